//! Generates the code of the wire format from `protos/nri.proto`.

use std::collections::HashMap;
use std::path::PathBuf;
use std::{env, fs, io, mem};

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
    let proto = fs::read_to_string("protos/nri.proto")?;
    let comments = comments(&proto);
    for file in ["nri.rs", "nri_ttrpc.rs"] {
        let path = out.join(file);
        let code = fs::read_to_string(&path)?;
        fs::write(&path, documented(&without_inner(&code), &comments))?;
    }
    Ok(())
}

/// `include!` takes no inner attributes, and one of them would allow unsafe code, which this crate
/// forbids. The module that includes the files sets what they need.
fn without_inner(code: &str) -> String {
    let inner = |line: &&str| line.starts_with("#![") || line.starts_with("//!");
    let lines: Vec<&str> = code.lines().filter(|line| !inner(line)).collect();
    lines.join("\n")
}

/// Puts the definitions' comments where the generator marks what they are about: it has none itself,
/// as its parser drops them.
fn documented(code: &str, comments: &HashMap<String, Vec<&str>>) -> String {
    let mut out = String::new();
    for line in code.lines() {
        let about = line
            .trim()
            .strip_prefix("// @@protoc_insertion_point(")
            .and_then(|marker| {
                marker
                    .strip_suffix(')')?
                    .split_once(":nri.pkg.api.v1alpha1.")
            })
            .and_then(|(_, name)| comments.get(name));
        for comment in about.into_iter().flatten() {
            out.extend(["///", comment, "\n"]);
        }
        out.extend([line, "\n"]);
    }
    out
}

/// What stands right above a message, a field or a value of our own definitions, by its name:
/// `Mount`, `Mount.source`. None of them is nested deeper than that.
fn comments(proto: &str) -> HashMap<String, Vec<&str>> {
    let mut found = HashMap::new();
    let (mut whole, mut above) = (None, Vec::new());
    for line in proto.lines().map(str::trim) {
        if let Some(comment) = line.strip_prefix("//") {
            above.push(comment);
            continue;
        }
        let above = mem::take(&mut above);
        let name = match line.split_once(['{', '=']) {
            Some((before, _)) => before.split_whitespace().last(),
            None => None,
        };
        match (whole, name) {
            (None, Some(name)) if line.ends_with('{') => {
                found.insert(name.to_owned(), above);
                whole = Some(name);
            }
            (Some(whole), Some(part)) => {
                found.insert(format!("{whole}.{part}"), above);
            }
            _ if line == "}" => whole = None,
            _ => {}
        }
    }
    found
}
