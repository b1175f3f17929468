//! What must be true of a pod once it has restarted in place: the heart of these tests.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::evidence::{Deed, Entry};
use crate::pod::LivePod;
use crate::recorder::Snapshot;
use crate::runtime::State;
use crate::shape::Kind;
use crate::wait::{self, PATIENCE};

/// The kubelet looks at the runtime every second and may act on the look before the last.
pub(crate) const TWO_RELISTS: Duration = Duration::from_millis(2500);

/// The pod as it was before a container exited.
pub(crate) struct Before {
    pub(crate) snapshot: Snapshot,
    pub(crate) sandbox: String,
    evidence: usize,
    mark: usize,
}

impl Before {
    pub(crate) async fn of(pod: &LivePod) -> Result<Self> {
        let snapshot = pod.recorder.current();
        // What runs may not have written its first line yet.
        for (name, _) in snapshot.containers.iter().filter(|(_, c)| c.is_running) {
            pod.until_listening(name).await?;
        }
        Ok(Self {
            snapshot,
            sandbox: pod.sandbox().await?,
            evidence: pod.evidence()?.len(),
            mark: pod.recorder.mark(),
        })
    }

    fn had_run(&self, container: &str) -> bool {
        self.seen_id(container).is_some_and(|id| !id.is_empty())
    }

    fn seen_id(&self, container: &str) -> Option<&str> {
        let seen = self.snapshot.containers.get(container)?;
        Some(&seen.id)
    }

    fn restarts(&self, container: &str) -> i32 {
        let seen = self.snapshot.containers.get(container);
        seen.map_or(0, |seen| seen.restarts)
    }

    /// The first container of these kinds that is not a fresh instance.
    fn not_fresh(
        &self,
        pod: &LivePod,
        now: &Snapshot,
        of: impl Fn(Kind) -> bool,
    ) -> Option<String> {
        let mut containers = pod.shape.containers.iter().filter(|it| of(it.kind));
        containers.find_map(|container| {
            let seen = now.containers.get(container.name)?;
            let same = self.seen_id(container.name) == Some(seen.id.as_str());
            same.then(|| format!("{} is still the old instance", container.name))
        })
    }

    /// The first container whose restartCount has not gone up by one. Those that had not run before
    /// the exit (it was an init container's) begin at 0.
    fn miscounted(&self, pod: &LivePod, now: &Snapshot) -> Option<String> {
        pod.shape.containers.iter().find_map(|container| {
            let name = container.name;
            let wanted = self.restarts(name) + i32::from(self.had_run(name));
            let seen = now.containers.get(name)?;
            (seen.restarts != wanted)
                .then(|| format!("restartCount of {name} is {}, not {wanted}", seen.restarts))
        })
    }
}

impl LivePod {
    /// Lets `trigger` exit with `code` and checks that the whole pod starts afresh in place.
    pub(crate) async fn restarts_all(&self, trigger: &str, code: i32) -> Result<()> {
        let before = Before::of(self).await?;
        self.exit(trigger, code).await?;
        self.has_restarted(&before).await?;
        self.exit_is_kept(&before, trigger, code).await
    }

    pub(crate) async fn has_restarted(&self, before: &Before) -> Result<()> {
        self.recorder
            .until_alive("all containers run again", PATIENCE, |now| {
                self.not_running(now)
                    .or_else(|| before.not_fresh(self, now, |_| true))
                    .or_else(|| before.miscounted(self, now))
            })
            .await?;
        self.recorder
            .stays_for(TWO_RELISTS, |now| {
                self.not_running(now)
                    .or_else(|| before.miscounted(self, now))
            })
            .await
            .context("it ran, but it did not last")?;
        self.is_the_same_pod(before).await?;
        self.was_never_over(before)?;
        self.inits_ran_once_in_order(before)?;
        self.started_in_spec_order().await?;
        self.left_nothing_behind(before).await
    }

    /// For restarts that the plugin was killed in: everything runs, and what runs is new. While there
    /// is no plugin there is no gate, so the kubelet may have gone on without the init containers.
    pub(crate) async fn has_recovered(&self, before: &Before) -> Result<()> {
        let lasting = |kind| kind != Kind::Init;
        let recovered = |now: &Snapshot| {
            self.not_running(now)
                .or_else(|| before.not_fresh(self, now, lasting))
        };
        self.recorder
            .until_alive("all containers run again", PATIENCE, recovered)
            .await?;
        self.until_runtime_is_tidy().await?;
        self.recorder
            .stays_for(TWO_RELISTS, recovered)
            .await
            .context("it ran, but it did not last")?;
        self.is_the_same_pod(before).await?;
        self.was_never_over(before)?;
        self.left_nothing_behind(before).await
    }

    /// UID, address, sandbox and emptyDir.
    async fn is_the_same_pod(&self, before: &Before) -> Result<()> {
        let now = self.recorder.current();
        ensure!(now.uid == before.snapshot.uid, "the pod's UID changed");
        ensure!(
            now.ip == before.snapshot.ip,
            "the pod's address was {} and is {}",
            before.snapshot.ip,
            now.ip
        );
        let sandbox = self.sandbox().await?;
        ensure!(sandbox == before.sandbox, "the pod has another sandbox");
        // Lines are only ever appended, so a kept emptyDir has at least as many.
        ensure!(
            self.evidence()?.len() > before.evidence,
            "the emptyDir has lost what was in it"
        );
        Ok(())
    }

    /// Neither Failed nor Succeeded since the exit.
    fn was_never_over(&self, before: &Before) -> Result<()> {
        for moment in self.recorder.since(before.mark) {
            let seen = &moment.snapshot;
            ensure!(!seen.is_over(), "the pod was seen {}: {seen}", seen.phase);
        }
        Ok(())
    }

    /// As the containers themselves wrote it down.
    fn inits_ran_once_in_order(&self, before: &Before) -> Result<()> {
        let after = self.evidence()?.split_off(before.evidence);
        let began_again: Vec<&Entry> = after
            .iter()
            .filter(|entry| !matches!(entry.deed, Deed::Exited(_)))
            .collect();
        let is_init = |entry: &&&Entry| {
            self.shape
                .of_kind(Kind::Init)
                .any(|init| init.name == entry.container)
        };
        let inits: Vec<(&str, &Deed)> = began_again
            .iter()
            .filter(is_init)
            .map(|entry| (entry.container.as_str(), &entry.deed))
            .collect();
        let wanted: Vec<(&str, &Deed)> = self
            .shape
            .of_kind(Kind::Init)
            .flat_map(|init| [(init.name, &Deed::Began), (init.name, &Deed::Ended)])
            .collect();
        ensure!(
            inits == wanted,
            "init containers should have run once each, in order: {inits:?}"
        );
        let last_init = began_again
            .iter()
            .rposition(|entry| is_init(&entry))
            .map_or(0, |position| position + 1);
        for container in &self.shape.containers {
            let runs: Vec<usize> = began_again
                .iter()
                .enumerate()
                .filter(|(_, entry)| entry.container == container.name && entry.deed == Deed::Began)
                .map(|(position, _)| position)
                .collect();
            ensure!(
                runs.len() == 1,
                "{} should have begun once and began {} times",
                container.name,
                runs.len()
            );
            ensure!(
                container.kind != Kind::Regular || runs[0] >= last_init,
                "{} began before the init containers were through",
                container.name
            );
        }
        Ok(())
    }

    /// As the runtime wrote it down: inits and sidecars one after another, then the regular ones.
    async fn started_in_spec_order(&self) -> Result<()> {
        let containers = self.containers().await?;
        let created = |name: &str| {
            containers
                .iter()
                .filter(|container| container.name() == name && !container.is_placeholder())
                .map(|container| container.created_at)
                .max()
        };
        let mut newest = i64::MIN;
        for early in self
            .shape
            .containers
            .iter()
            .filter(|container| container.kind != Kind::Regular)
        {
            let at = created(early.name)
                .with_context(|| format!("{} is not in the runtime", early.name))?;
            ensure!(at > newest, "{} was created before its turn", early.name);
            newest = at;
        }
        for regular in self.shape.of_kind(Kind::Regular) {
            let at = created(regular.name)
                .with_context(|| format!("{} is not in the runtime", regular.name))?;
            ensure!(at > newest, "{} was created before its turn", regular.name);
        }
        Ok(())
    }

    /// Neither in the runtime nor on disk.
    async fn left_nothing_behind(&self, before: &Before) -> Result<()> {
        self.until_runtime_is_tidy().await?;
        let record = self.plugin.record_file(&before.sandbox);
        wait::until("the record of the restart is gone", PATIENCE, async || {
            Ok(if record.exists() {
                Err(std::fs::read_to_string(&record).unwrap_or_default())
            } else {
                Ok(())
            })
        })
        .await
    }

    /// `lastState` and `logs --previous` of the trigger, wherever its old container stays.
    async fn exit_is_kept(&self, before: &Before, trigger: &str, code: i32) -> Result<()> {
        if !self.shape.keeps_exit_of(trigger, code)?
            || self.kubelet_has_collected(before, trigger).await?
        {
            return Ok(());
        }
        let wanted = format!("exit {code} ");
        self.recorder
            .until("lastState shows the exit", PATIENCE, |now| {
                let seen = now.containers.get(trigger)?;
                (!seen.last_state.starts_with(&wanted))
                    .then(|| format!("lastState of {trigger} is {}", seen.last_state))
            })
            .await?;
        let log = self.previous_log(trigger).await?;
        ensure!(
            log.contains(&format!("{trigger} exits with {code}")),
            "logs --previous of {trigger} has {log:?}"
        );
        Ok(())
    }

    /// Once a minute the kubelet removes all dead containers of a name but the newest (`kuberuntime_gc.go`). If that
    /// minute is up while a placeholder is the newest, the exit before it goes, with its log: a known limit. Only
    /// what the plugin did not remove itself is taken for this.
    async fn kubelet_has_collected(&self, before: &Before, container: &str) -> Result<bool> {
        let id = before.seen_id(container).unwrap_or_default();
        let id = id.rsplit('/').next().unwrap_or_default();
        let there = self.containers().await?.iter().any(|it| it.id == id);
        let removed = self
            .plugin
            .log_lines(&format!("Remove(ContainerId(\"{id}"))?;
        let collected = !there && removed.is_empty() && self.shape.is_shielded();
        if collected {
            println!(
                "note: the kubelet collected {container} of {} ({id})",
                self.name
            );
        }
        Ok(collected)
    }

    /// Lets `container` exit with `code` and checks that it alone is started again.
    pub(crate) async fn restarts_alone(&self, container: &str, code: i32) -> Result<()> {
        let before = Before::of(self).await?;
        self.exit(container, code).await?;
        self.has_restarted_alone(&before, container).await?;
        if self.kubelet_has_collected(&before, container).await? {
            return Ok(());
        }
        self.recorder
            .until("lastState shows the exit", PATIENCE, |now| {
                let seen = now.containers.get(container)?;
                (!seen.last_state.starts_with(&format!("exit {code} ")))
                    .then(|| format!("lastState of {container} is {}", seen.last_state))
            })
            .await?;
        Ok(())
    }

    async fn has_restarted_alone(&self, before: &Before, container: &str) -> Result<()> {
        let wrong = |now: &Snapshot| {
            let seen = now.containers.get(container)?;
            if seen.restarts != before.restarts(container) + 1 {
                return Some(format!("restartCount of {container} is {}", seen.restarts));
            }
            self.shape
                .containers
                .iter()
                .filter(|other| other.name != container)
                .find(|other| {
                    let id = now.containers.get(other.name).map(|seen| seen.id.as_str());
                    id != before.seen_id(other.name)
                })
                .map(|other| format!("{} was touched", other.name))
        };
        self.recorder
            .until_alive("one container runs again", PATIENCE, |now| {
                self.not_running(now).or_else(|| wrong(now))
            })
            .await?;
        self.recorder
            .stays_for(TWO_RELISTS, |now| {
                self.not_running(now).or_else(|| wrong(now))
            })
            .await
            .context("it ran, but it did not last")?;
        self.is_the_same_pod(before).await?;
        self.was_never_over(before)?;
        self.left_nothing_behind(before).await
    }

    /// Lets `container` exit with `code` and checks that nothing is started again.
    pub(crate) async fn stays_down(&self, container: &str, code: i32) -> Result<()> {
        let before = Before::of(self).await?;
        self.exit(container, code).await?;
        let state = format!("exit {code} ");
        self.until_state(container, &state).await?;
        self.recorder
            .stays_for(TWO_RELISTS, |now| {
                now.containers.iter().find_map(|(name, seen)| {
                    (seen.restarts != before.restarts(name))
                        .then(|| format!("{name} was started again"))
                })
            })
            .await?;
        let running = self.containers().await?;
        let again = running
            .iter()
            .any(|c| c.name() == container && c.state() != State::Exited);
        ensure!(!again, "{container} was started again in the runtime");
        Ok(())
    }
}
