//! Generates the code of the wire formats from `protos/`.

use std::io;

/// The CRI and containerd's own API.
fn main() -> io::Result<()> {
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
