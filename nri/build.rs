//! Generates the code of the wire format from `protos/nri.proto`.

use std::path::PathBuf;
use std::{env, fs, io};

/// NRI speaks ttrpc. The generators are pure Rust: no protoc is needed.
fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=protos/nri.proto");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("no OUT_DIR"))?);
    ttrpc_codegen::Codegen::new()
        .out_dir(&out)
        .input("protos/nri.proto")
        .include("protos")
        .rust_protobuf()
        .customize(ttrpc_codegen::Customize {
            async_all: true,
            ..Default::default()
        })
        .run()?;
    // `include!` takes no inner attributes, and one of them would allow unsafe code, which this
    // crate forbids. The module that includes the files sets what they need.
    for file in ["nri.rs", "nri_ttrpc.rs"] {
        let path = out.join(file);
        let code = fs::read_to_string(&path)?;
        let inner = |line: &&str| line.starts_with("#![") || line.starts_with("//!");
        let lines: Vec<&str> = code.lines().filter(|line| !inner(line)).collect();
        fs::write(&path, lines.join("\n"))?;
    }
    Ok(())
}
