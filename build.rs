//! Generates the code of the wire formats from `protos/`.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("no OUT_DIR"))?);
    nri(&out)?;
    cri()
}

/// NRI speaks ttrpc. The generators are pure Rust: no protoc is needed.
fn nri(out: &Path) -> io::Result<()> {
    println!("cargo:rerun-if-changed=protos/nri.proto");
    ttrpc_codegen::Codegen::new()
        .out_dir(out)
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

/// The CRI and containerd's own API.
fn cri() -> io::Result<()> {
    const FILES: [&str; 4] = [
        "cri.proto",
        "containerd/events.proto",
        "containerd/services_events.proto",
        "containerd/services_tasks.proto",
    ];
    println!("cargo:rerun-if-changed=protos/cri.proto");
    println!("cargo:rerun-if-changed=protos/containerd");
    let descriptors = protox::compile(FILES, ["protos"]).map_err(io::Error::other)?;
    tonic_prost_build::configure()
        .build_transport(false)
        .btree_map(".")
        // containerd prints CRI messages as JSON: Go's field names, defaults left out.
        .message_attribute(
            ".runtime.v1",
            "#[derive(serde::Serialize, serde::Deserialize)]\n#[serde(default)]",
        )
        .field_attribute(
            ".runtime.v1.Mount.uidMappings",
            "#[serde(rename = \"uidMappings\")]",
        )
        .field_attribute(
            ".runtime.v1.Mount.gidMappings",
            "#[serde(rename = \"gidMappings\")]",
        )
        .field_attribute(
            ".runtime.v1.ContainerConfig.CDI_devices",
            "#[serde(rename = \"CDI_devices\")]",
        )
        .field_attribute(
            ".runtime.v1.KeyValue.value",
            "#[serde(with = \"crate::cri::config::text\")]",
        )
        .compile_fds(descriptors)?;
    Ok(())
}
