//! Prints a line for each event, in the spirit of `plugins/logger` of github.com/containerd/nri.
//!
//! As root, on a node: `logger [SOCKET]`. Ctrl-C ends it.

use std::process::ExitCode;
use std::{env, io};

use nri::api::{Container, ContainerAdjustment, PodSandbox};
use nri::{DEFAULT_SOCKET, EventMask, NriError, Plugin, Refusal, RuntimeInfo, Stub};
use tokio::signal::ctrl_c;

struct Logger;

impl Plugin for Logger {
    fn events(&self) -> EventMask {
        EventMask::ALL
    }

    async fn configure(&self, runtime: RuntimeInfo, _config: String) -> Result<(), Refusal> {
        println!("configure: {} {}", runtime.name, runtime.version);
        Ok(())
    }

    async fn synchronize(&self, pods: Vec<PodSandbox>, containers: Vec<Container>) {
        for pod in &pods {
            print_pod("synchronize", pod);
        }
        for container in &containers {
            let pod = pods.iter().find(|pod| pod.id == container.pod_sandbox_id);
            print_container("synchronize", pod.unwrap_or_default(), container);
        }
    }

    async fn connecting(&self) {
        println!("connecting");
    }

    async fn disconnected(&self) {
        println!("disconnected");
    }

    async fn run_pod_sandbox(&self, pod: PodSandbox) {
        print_pod("run_pod_sandbox", &pod);
    }

    async fn update_pod_sandbox(&self, pod: PodSandbox) {
        print_pod("update_pod_sandbox", &pod);
    }

    async fn post_update_pod_sandbox(&self, pod: PodSandbox) {
        print_pod("post_update_pod_sandbox", &pod);
    }

    async fn stop_pod_sandbox(&self, pod: PodSandbox) {
        print_pod("stop_pod_sandbox", &pod);
    }

    async fn remove_pod_sandbox(&self, pod: PodSandbox) {
        print_pod("remove_pod_sandbox", &pod);
    }

    async fn create_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> Result<ContainerAdjustment, Refusal> {
        print_container("create_container", &pod, &container);
        Ok(ContainerAdjustment::new())
    }

    async fn validate_container_adjustment(
        &self,
        pod: PodSandbox,
        container: Container,
        _adjustment: ContainerAdjustment,
    ) -> Result<(), Refusal> {
        print_container("validate_container_adjustment", &pod, &container);
        Ok(())
    }

    async fn post_create_container(&self, pod: PodSandbox, container: Container) {
        print_container("post_create_container", &pod, &container);
    }

    async fn start_container(&self, pod: PodSandbox, container: Container) {
        print_container("start_container", &pod, &container);
    }

    async fn post_start_container(&self, pod: PodSandbox, container: Container) {
        print_container("post_start_container", &pod, &container);
    }

    async fn update_container(&self, pod: PodSandbox, container: Container) {
        print_container("update_container", &pod, &container);
    }

    async fn post_update_container(&self, pod: PodSandbox, container: Container) {
        print_container("post_update_container", &pod, &container);
    }

    async fn stop_container(&self, pod: PodSandbox, container: Container) {
        print_container("stop_container", &pod, &container);
    }

    async fn remove_container(&self, pod: PodSandbox, container: Container) {
        print_container("remove_container", &pod, &container);
    }
}

fn print_pod(event: &str, pod: &PodSandbox) {
    println!("{event}: {}/{} {}", pod.namespace, pod.name, pod.id);
}

fn print_container(event: &str, pod: &PodSandbox, container: &Container) {
    println!(
        "{event}: {}/{}/{} {}",
        pod.namespace, pod.name, container.name, container.id
    );
}

async fn run() -> Result<(), NriError> {
    let socket = env::args().nth(1).unwrap_or(DEFAULT_SOCKET.into());
    let stub = Stub::builder(Logger)
        .name("logger")
        .index("00")
        .socket(socket)
        .build()?;
    stub.run(async {
        // Without signals there is nothing but to be killed.
        let _ = ctrl_c().await;
    })
    .await
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    // What the stub has to say, mostly of connections that come and go.
    tracing_subscriber::fmt().with_writer(io::stderr).init();
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("logger: {error}");
            ExitCode::FAILURE
        }
    }
}
