//! What the plugin costs a node when nothing restarts.

use std::collections::HashMap;
use std::fs::File;
use std::future::ready;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use serde::Serialize;
use tokio::net::UnixListener;
use tokio::time::timeout;

use crate::api_server::ApiServer;
use crate::hostile;
use crate::machine::{at_rest, value_of};
use crate::node::Node;
use crate::nri::{Answer, Container, CreateContainerRequest, Mount, PodSandbox, Runtime};
use crate::options::Options;
use crate::plugin::{Plugin, Sockets};
use crate::pod::LivePod;
use crate::say;
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// A kubelet that is given more at once starts each of them later than anyone waits for.
const AT_ONCE: usize = 10;

/// No runtime makes pods as fast.
pub(crate) const BETWEEN_HOSTILE: Duration = Duration::from_millis(10);

const CONTAINER: &str = "trainer";

/// One container in so many is asked about behind one of a hostile pod.
const HOSTILE: u32 = 10;

#[derive(Serialize)]
pub(crate) struct Costs {
    /// Just started, no pod on the node.
    pub(crate) idle: Resident,
    pub(crate) with_pods: Resident,
    /// The most that was ever resident.
    pub(crate) resident_kib_peak: u64,
    pub(crate) binary_bytes: u64,
    pub(crate) create_container_request_bytes: usize,
    /// Per cent of its cores' time that the machine was busy when the next two began.
    pub(crate) busy_percent: f64,
    /// As many bytes, to a peer that answers at once: what the machine takes by itself.
    pub(crate) echo_us: Vec<f64>,
    pub(crate) create_container_us: Vec<f64>,
    pub(crate) echo_behind_hostile_us: Vec<f64>,
    pub(crate) create_container_behind_hostile_us: Vec<f64>,
    pub(crate) create_container_with_hostile_us: Vec<f64>,
    pub(crate) hook_ms: Vec<f64>,
}

/// A process's memory.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Resident {
    pub(crate) kib: u64,
    /// What is not the page cache's: without the pages of its binary that it has touched.
    pub(crate) anonymous_kib: u64,
}

pub(crate) async fn measure(
    node: &Arc<Node>,
    plugin: &Arc<Plugin>,
    options: &Options,
    idle: Resident,
) -> Result<Costs> {
    say(&format!("{} starts of the hook", options.hooks));
    let hook_ms = hook(&plugin.binary, options.hooks)?;
    let stage = Stage::new(Arc::clone(node), Arc::clone(plugin), "bench");
    let measured = with_pods(&stage, options).await;
    let (with_pods, peak, handler) = match measured {
        Ok(measured) => measured,
        Err(error) => {
            // Half of them may be there; the first failure is the one to hear of.
            let _ = stage.delete_pods().await;
            return Err(error);
        }
    };
    say("deleting the pods");
    stage.delete_pods().await?;
    Ok(Costs {
        idle,
        with_pods,
        resident_kib_peak: peak,
        binary_bytes: std::fs::metadata(&plugin.binary)?.len(),
        create_container_request_bytes: handler.request_bytes,
        busy_percent: handler.busy_percent,
        echo_us: handler.echo_us,
        create_container_us: handler.took_us,
        echo_behind_hostile_us: handler.echo_behind_hostile_us,
        create_container_behind_hostile_us: handler.behind_hostile_us,
        create_container_with_hostile_us: handler.with_hostile_us,
        hook_ms,
    })
}

/// Memory, and then, for the same pods, the handler.
async fn with_pods(stage: &Stage, options: &Options) -> Result<(Resident, u64, Handler)> {
    let mut pods = Vec::new();
    while pods.len() < options.pods {
        let missing = AT_ONCE.min(options.pods - pods.len());
        let shape = || {
            Shape::never()
                .regular(CONTAINER)
                .restarts_all(CONTAINER, 42)
        };
        pods.extend(try_join_all((0..missing).map(|_| stage.running(shape()))).await?);
        say(&format!("{} of {} pods run", pods.len(), options.pods));
    }
    let pid = stage.plugin.pid().await?;
    let memory = resident(pid)?;
    let peak = peak_kib(pid)?;
    stage.plugin.must_be_well().await?;
    stage.plugin.stop().await?;
    let handler = handler(stage, &pods, options.calls).await?;
    Ok((memory, peak, handler))
}

pub(crate) fn resident(pid: u32) -> Result<Resident> {
    Ok(Resident {
        kib: kib(pid, "VmRSS")?,
        anonymous_kib: kib(pid, "RssAnon")?,
    })
}

/// The most that it was since the process started.
pub(crate) fn peak_kib(pid: u32) -> Result<u64> {
    kib(pid, "VmHWM")
}

fn kib(pid: u32, key: &str) -> Result<u64> {
    let value = value_of(&format!("/proc/{pid}/status"), key)?;
    Ok(value.trim_end_matches(" kB").parse()?)
}

/// Milliseconds from the start of each process to its end, with no plugin to talk to.
fn hook(binary: &Path, runs: u32) -> Result<Vec<f64>> {
    let dir = tempfile::tempdir()?;
    let state = dir.path().join("state");
    let text = serde_json::json!({
        "ociVersion": "1.2.0",
        "id": "0".repeat(64),
        "status": "stopped",
        "bundle": "/run/containerd/io.containerd.runtime.v2.task/k8s.io/c",
    });
    std::fs::write(&state, text.to_string())?;
    let mut took = Vec::new();
    for _ in 0..runs {
        let mut command = Command::new(binary);
        command
            .arg("hook")
            .arg(dir.path().join("hook.sock"))
            .arg(dir.path().join("held"))
            .stdin(File::open(&state)?)
            .stdout(Stdio::null());
        let began = Instant::now();
        let status = command.status()?;
        took.push(began.elapsed().as_secs_f64() * 1e3);
        ensure!(status.success(), "the hook ended with {status}");
    }
    Ok(took)
}

/// What the handler takes.
struct Handler {
    request_bytes: usize,
    busy_percent: f64,
    /// Microseconds that the same bytes take to a thread that answers them at once, in turns with the next.
    echo_us: Vec<f64>,
    /// Microseconds from asking about a container of a pod without rules to the answer.
    took_us: Vec<f64>,
    /// And those behind a question about a hostile pod, in turns with the next.
    echo_behind_hostile_us: Vec<f64>,
    /// The same while the plugin reads what a pod that means harm has for annotations: its first container has been asked
    /// about just before.
    behind_hostile_us: Vec<f64>,
    /// The two questions together.
    with_hostile_us: Vec<f64>,
}

/// Asks the plugin about containers of pods without rules, while it knows `pods`. Another process of the same plugin, because the first
/// one's runtime does not let anybody else ask; its events go to nobody who would keep these cores busy with them.
async fn handler(stage: &Stage, pods: &[Arc<LivePod>], calls: u32) -> Result<Handler> {
    let dir = tempfile::tempdir()?;
    let api_server = ApiServer::start(dir.path()).await?;
    let sockets = Sockets {
        nri: dir.path().join("nri.sock"),
        kubeconfig: Some(api_server.kubeconfig.clone()),
        ..Sockets::of(&stage.node)
    };
    let listener = UnixListener::bind(&sockets.nri)?;
    let log = File::create(dir.path().join("plugin.log"))?;
    let _plugin = Ended(
        stage
            .plugin
            .command(dir.path(), &sockets)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?,
    );
    let (trunk, _) = timeout(PATIENCE, listener.accept())
        .await
        .context("the plugin does not connect")??;
    let mut runtime = Runtime::welcome(into_blocking(trunk)?)?;
    for pod in pods {
        until_known(&mut runtime, pod).await?;
    }
    let busy_percent = at_rest().await?;
    say(&format!(
        "{calls} containers of pods without rules, while {} pods with rules are known",
        pods.len()
    ));
    let request_bytes = prost::Message::encoded_len(&without_rules(0));
    let mut echo = Echo::start(request_bytes)?;
    let (mut echo_us, mut took_us) = (Vec::new(), Vec::new());
    for call in 0..calls {
        echo_us.push(echo.answers()?);
        took_us.push(unchanged(&mut runtime, &without_rules(call))?);
    }
    let calls = calls.div_ceil(HOSTILE);
    say(&format!("{calls} more, each behind one of a hostile pod"));
    let (mut behind_hostile_us, mut with_hostile_us) = (Vec::new(), Vec::new());
    let mut echo_behind_hostile_us = Vec::new();
    for call in 0..calls {
        // A runtime asks about one container at a time (`Adaptation.CreateContainer`, NRI's `pkg/adaptation`).
        let (_, first) = runtime.create_container(&hostile_one(2 * call))?;
        let then = unchanged(&mut runtime, &without_rules(call))?;
        behind_hostile_us.push(then);
        with_hostile_us.push(first.as_secs_f64() * 1e6 + then);
        std::thread::sleep(BETWEEN_HOSTILE);
        // What the plugin does meanwhile takes the cores from everybody.
        runtime.create_container(&hostile_one(2 * call + 1))?;
        echo_behind_hostile_us.push(echo.answers()?);
        std::thread::sleep(BETWEEN_HOSTILE);
    }
    Ok(Handler {
        request_bytes,
        busy_percent,
        echo_us,
        took_us,
        echo_behind_hostile_us,
        behind_hostile_us,
        with_hostile_us,
    })
}

/// A thread that answers at once.
struct Echo {
    question: Vec<u8>,
    asking: UnixStream,
}

impl Echo {
    fn start(question_bytes: usize) -> Result<Self> {
        let (asking, mut answering) = UnixStream::pair()?;
        let question = vec![0; question_bytes];
        let mut asked = question.clone();
        // Its end is that of the other stream.
        std::thread::spawn(move || {
            while answering.read_exact(&mut asked).is_ok() && answering.write_all(&[0]).is_ok() {}
        });
        Ok(Self { question, asking })
    }

    /// Microseconds to the answer.
    fn answers(&mut self) -> Result<f64> {
        let asked = Instant::now();
        self.asking.write_all(&self.question)?;
        self.asking.read_exact(&mut [0])?;
        Ok(asked.elapsed().as_secs_f64() * 1e6)
    }
}

/// Microseconds to the answer.
fn unchanged(runtime: &mut Runtime, request: &CreateContainerRequest) -> Result<f64> {
    let (answer, took) = runtime.create_container(request)?;
    ensure!(
        answer == Answer::Unchanged,
        "a container of a pod without rules: {answer:?}"
    );
    Ok(took.as_secs_f64() * 1e6)
}

fn into_blocking(stream: tokio::net::UnixStream) -> Result<UnixStream> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Waits until the plugin knows that the pod's container runs, which it has from the runtime: then it
/// refuses another of that name.
async fn until_known(runtime: &mut Runtime, pod: &LivePod) -> Result<()> {
    let sandbox = pod.sandbox().await?;
    let manifest = pod.shape.manifest(&pod.name, "", "")?;
    let request = CreateContainerRequest {
        pod: Some(PodSandbox {
            id: sandbox.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            namespace: "default".to_owned(),
            annotations: manifest
                .metadata
                .annotations
                .into_iter()
                .flatten()
                .collect(),
            ..PodSandbox::default()
        }),
        container: Some(Container {
            id: "another".to_owned(),
            pod_sandbox_id: sandbox,
            name: CONTAINER.to_owned(),
            ..Container::default()
        }),
    };
    wait::until("the plugin knows a pod with rules", PATIENCE, || {
        let asked = runtime.create_container(&request);
        ready(asked.map(|(answer, _)| match answer {
            Answer::Refused(_) => Ok(()),
            other => Err(format!("{other:?}")),
        }))
    })
    .await
}

/// About what a runtime sends of a web server with a service account and its service's neighbours.
fn without_rules(number: u32) -> CreateContainerRequest {
    let sandbox = format!("{number:064x}");
    let labels = |more: &[(&str, &str)]| -> HashMap<String, String> {
        [
            ("io.kubernetes.pod.name", "web-6d4b75cb6d-hk2xq"),
            ("io.kubernetes.pod.namespace", "default"),
            (
                "io.kubernetes.pod.uid",
                "8f4b3b0e-6c43-4f0c-9f5e-0d4a35b0f6a1",
            ),
        ]
        .iter()
        .chain(more)
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
    };
    let annotations = [
        (
            "kubernetes.io/config.seen",
            "2025-01-01T00:00:00.000000000Z",
        ),
        ("kubernetes.io/config.source", "api"),
        ("prometheus.io/scrape", "true"),
    ];
    CreateContainerRequest {
        pod: Some(PodSandbox {
            id: sandbox.clone(),
            name: "web-6d4b75cb6d-hk2xq".to_owned(),
            uid: "8f4b3b0e-6c43-4f0c-9f5e-0d4a35b0f6a1".to_owned(),
            namespace: "default".to_owned(),
            labels: labels(&[("app", "web"), ("pod-template-hash", "6d4b75cb6d")]),
            annotations: annotations
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
        }),
        container: Some(Container {
            id: format!("{:064x}", u64::from(number) << 32),
            pod_sandbox_id: sandbox,
            name: "web".to_owned(),
            labels: labels(&[("io.kubernetes.container.name", "web")]),
            annotations: HashMap::from([(
                "io.kubernetes.container.restartCount".to_owned(),
                "0".to_owned(),
            )]),
            args: vec!["/usr/bin/web".to_owned(), "--port=8080".to_owned()],
            env: (0..40)
                .map(|number| format!("BACKEND_{number}_SERVICE_HOST=10.96.0.{number}"))
                .collect(),
            mounts: (0..16)
                .map(|number| Mount {
                    destination: format!("/var/run/volume-{number}"),
                    kind: "bind".to_owned(),
                    source: format!("/var/lib/kubelet/pods/web/volumes/{number}"),
                    options: ["rbind", "rprivate", "ro"].map(str::to_owned).into(),
                })
                .collect(),
        }),
    }
}

/// The first container of a pod whose annotations are to keep the plugin busy.
fn hostile_one(number: u32) -> CreateContainerRequest {
    let mut request = without_rules(number);
    if let Some(pod) = &mut request.pod {
        pod.id = format!("{number:0>64}");
        pod.uid = format!("hostile-{number}");
        let value = hostile::annotation(number);
        pod.annotations.insert(hostile::RULES.to_owned(), value);
    }
    request
}

/// A process that does not outlive its measurement.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended by itself, and nobody is left to hear of anything else.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
