//! The wire: what `build.rs` generates from `protos/`, in the module tree that the packages ask for.

#![allow(missing_docs, deprecated, clippy::pedantic, clippy::enum_variant_names)]

pub(crate) mod runtime {
    pub(crate) mod v1 {
        tonic::include_proto!("runtime.v1");
    }
}

pub(crate) mod containerd {
    pub(crate) mod events {
        tonic::include_proto!("containerd.events");
    }
    pub(crate) mod services {
        pub(crate) mod events {
            pub(crate) mod v1 {
                tonic::include_proto!("containerd.services.events.v1");
            }
        }
        pub(crate) mod tasks {
            pub(crate) mod v1 {
                tonic::include_proto!("containerd.services.tasks.v1");
            }
        }
    }
    pub(crate) mod types {
        tonic::include_proto!("containerd.types");
    }
    pub(crate) mod v1 {
        pub(crate) mod types {
            tonic::include_proto!("containerd.v1.types");
        }
    }
}
