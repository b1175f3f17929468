//! What must be true of a pod once it has restarted in place: the heart of these tests.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::sleep;

use crate::evidence::{self, Deed, Entry};
use crate::pod::LivePod;
use crate::recorder::{Snapshot, Told};
use crate::runtime::{Container, State, describe};
use crate::shape::{ContainerShape, Kind, RestartPolicy};
use crate::wait::{self, PATIENCE};

/// The kubelet looks at the runtime every second and may act on the look before the last.
pub(crate) const TWO_RELISTS: Duration = Duration::from_millis(2500);
/// Between the first two restarts of a row.
const FIRST_BACK_OFF: Duration = Duration::from_secs(10);
/// How often a replay may take too long.
pub(crate) const TRIES: u32 = 3;

/// The pod as it was before a container exited.
pub(crate) struct Before {
    pub(crate) snapshot: Snapshot,
    pub(crate) sandbox: String,
    /// Containers that have ended and are to stay as they are.
    kept: &'static [&'static str],
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
            kept: &[],
            evidence: pod.evidence()?.len(),
            mark: pod.recorder.mark(),
        })
    }

    pub(crate) fn keeping(self, kept: &'static [&'static str]) -> Self {
        Self { kept, ..self }
    }

    /// The containers that are to start again.
    fn restarting<'a>(&self, pod: &'a LivePod) -> impl Iterator<Item = &'a ContainerShape> {
        let containers = pod.shape.containers.iter();
        containers.filter(|container| !self.kept.contains(&container.name))
    }

    /// The first container that is not as it is to be once the pod has restarted.
    fn not_running(&self, pod: &LivePod, now: &Snapshot) -> Option<String> {
        if self.kept.is_empty() {
            return pod.not_running(now);
        }
        let touched = self.kept.iter().find(|&&name| {
            let then = self.snapshot.containers.get(name);
            then != now.containers.get(name)
        });
        self.restarting(pod)
            .find_map(|container| container.unhealthy(now))
            .or_else(|| touched.map(|name| format!("{name} was touched")))
    }

    /// The first container whose restart the status does not tell of.
    pub(crate) fn untold(&self, pod: &LivePod, now: &Snapshot) -> Option<String> {
        self.not_fresh(pod, now, |_| true)
            .or_else(|| self.miscounted(pod, now))
    }

    fn had_run(&self, container: &str) -> bool {
        self.seen_id(container).is_some_and(|id| !id.is_empty())
    }

    pub(crate) fn seen_id(&self, container: &str) -> Option<&str> {
        let seen = self.snapshot.containers.get(container)?;
        Some(seen.id.as_str()).filter(|id| !id.is_empty())
    }

    /// What a container, unless it is the trigger, has to show as its exit: how it had ended, or that it was killed. `None`:
    /// it had not run, or waited to run again.
    fn exit_of(&self, container: &str) -> Option<String> {
        let seen = self.snapshot.containers.get(container)?;
        let ended = seen.state.starts_with("exit ").then(|| seen.state.clone());
        ended.or_else(|| seen.is_running.then(|| "exit 137 ".to_owned()))
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
        let mut containers = self.restarting(pod).filter(|it| of(it.kind));
        containers.find_map(|container| {
            let seen = now.containers.get(container.name)?;
            let same = self.seen_id(container.name) == Some(seen.id.as_str());
            same.then(|| format!("{} is still the old instance", container.name))
        })
    }

    /// The first container that lasts and is not a fresh instance.
    pub(crate) fn untold_of_lasting(&self, pod: &LivePod, now: &Snapshot) -> Option<String> {
        self.not_fresh(pod, now, |kind| kind != Kind::Init)
    }

    /// The first container whose restartCount has not gone up by one. Those that had not run before
    /// the exit (it was an init container's) begin at 0.
    fn miscounted(&self, pod: &LivePod, now: &Snapshot) -> Option<String> {
        self.restarting(pod).find_map(|container| {
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
        self.restarts_all_since(trigger, code).await.map(drop)
    }

    /// The same. Returns how the pod was before the last exit.
    pub(crate) async fn restarts_all_since(&self, trigger: &str, code: i32) -> Result<Before> {
        let before = self.restarted(trigger, code).await?;
        let decided = self.decided(trigger, code)?;
        let decided = decided.context("the plugin has decided nothing")?;
        self.restart_is_told(trigger, code, &decided).await?;
        self.exits_are_kept(&before, trigger, code).await?;
        Ok(before)
    }

    /// The same but for what is told and kept of it. Where a busy node had no time for a replay, the container exits once more.
    /// Returns how the pod was before the last exit.
    pub(crate) async fn restarted(&self, trigger: &str, code: i32) -> Result<Before> {
        let mut tries = 0;
        loop {
            let before = Before::of(self).await?;
            self.exit(trigger, code).await?;
            tries += 1;
            if tries == TRIES {
                self.has_restarted(&before).await?;
                return Ok(before);
            }
            self.has_restarted_or_begun_anew(&before).await?;
            if !self.took_too_long() {
                return Ok(before);
            }
            println!("note: {} was not replayed in time", self.name);
            // What starts one after another is not replayed in a back-off.
            sleep(FIRST_BACK_OFF * tries).await;
        }
    }

    /// Whether a replay was not through in time, and left to the kubelet.
    pub(crate) fn took_too_long(&self) -> bool {
        self.restart_ended("it took too long").is_ok()
    }

    /// One whose replay was not through in time begins anew for the kubelet: its init containers may run twice.
    pub(crate) async fn has_restarted_or_begun_anew(&self, before: &Before) -> Result<()> {
        let restarted = self.has_restarted(before).await;
        let has_inits = self.shape.of_kind(Kind::Init).next().is_some();
        if restarted.is_ok() || !has_inits || !self.took_too_long() {
            return restarted;
        }
        self.has_recovered(before).await?;
        self.is_counted_twice_at_most(before).await
    }

    /// No container has run more often than that, nor is counted more often, and each run of an init container came to its
    /// end.
    async fn is_counted_twice_at_most(&self, before: &Before) -> Result<()> {
        let after = self.evidence_since(before)?;
        let deeds = |container: &str| -> Vec<&Deed> {
            let entries = after.iter().filter(|it| it.container == container);
            entries.map(|it| &it.deed).collect()
        };
        for init in self.shape.of_kind(Kind::Init) {
            let deeds = deeds(init.name);
            let mut runs = deeds.chunks(2);
            ensure!(
                (2..=4).contains(&deeds.len())
                    && runs.all(|run| run == [&Deed::Began, &Deed::Ended]),
                "{} did {deeds:?}",
                init.name
            );
        }
        for lasting in self.shape.lasting() {
            let deeds = deeds(lasting.name);
            let begun = deeds.iter().filter(|&&deed| *deed == Deed::Began).count();
            ensure!((1..=2).contains(&begun), "{} did {deeds:?}", lasting.name);
        }
        let old = &before.snapshot.containers;
        let miscounted = |now: &Snapshot| {
            let mut containers = now.containers.iter();
            let found = containers.find(|(name, it)| {
                let more = it.restarts - old[*name].restarts;
                !(1..=2).contains(&more)
            });
            found.map(|(name, it)| format!("restartCount of {name} is {}", it.restarts))
        };
        let counted = self
            .recorder
            .until_alive("all restarts are counted", PATIENCE, miscounted);
        counted.await?;
        Ok(())
    }

    pub(crate) async fn has_restarted(&self, before: &Before) -> Result<()> {
        let restarted = self.runs_afresh(before).await;
        restarted.with_context(|| format!("{} (last said: {})", self.name, self.last_said()))
    }

    /// What the plugin decided last about it.
    fn last_said(&self) -> String {
        let lines = self.plugin.log_lines(&self.name).unwrap_or_default();
        let said = lines.iter().filter(|line| !line.contains(" DEBUG "));
        let said: Vec<&str> = said.map(|line| line.trim()).collect();
        said[said.len().saturating_sub(3)..].join("; ")
    }

    /// Waits until every container runs again, and the kubelet says so.
    pub(crate) async fn until_runs_afresh(
        &self,
        before: &Before,
        patience: Duration,
    ) -> Result<()> {
        let missing = |now: &Snapshot| {
            before
                .not_running(self, now)
                .or_else(|| before.untold(self, now))
        };
        let begun = self
            .recorder
            .until_alive("all containers run again", patience, missing);
        begun.await?;
        Ok(())
    }

    /// Waits until that container runs, and is another than it was.
    pub(crate) async fn until_container_is_new(
        &self,
        before: &Before,
        container: &str,
        patience: Duration,
    ) -> Result<()> {
        let old = before.seen_id(container);
        let renewed = self.recorder.until("a container is new", patience, |now| {
            let seen = now.containers.get(container)?;
            let new = seen.is_running && old != Some(seen.id.as_str());
            (!new).then(|| format!("{container} is {}", seen.state))
        });
        renewed.await?;
        Ok(())
    }

    async fn runs_afresh(&self, before: &Before) -> Result<()> {
        self.until_runs_afresh(before, PATIENCE).await?;
        self.recorder
            .stays_for(TWO_RELISTS, |now| {
                before
                    .not_running(self, now)
                    .or_else(|| before.miscounted(self, now))
            })
            .await
            .context("it ran, but it did not last")?;
        self.attempts_are_as_counted().await?;
        self.started_afresh(before).await
    }

    /// The kubelet goes on counting from the newest attempt in the runtime.
    async fn attempts_are_as_counted(&self) -> Result<()> {
        let containers = self.containers().await?;
        for (name, seen) in self.recorder.current().containers {
            let attempts = containers
                .iter()
                .filter(|it| it.name() == name && !it.is_placeholder());
            let newest = attempts.map(|it| i64::from(it.attempt())).max();
            ensure!(
                newest == Some(i64::from(seen.restarts)),
                "{name} was restarted {} times, and its attempt is {newest:?}",
                seen.restarts
            );
        }
        Ok(())
    }

    /// For restarts that the status does not tell of yet.
    pub(crate) async fn has_restarted_unseen(&self, before: &Before) -> Result<()> {
        self.until_begun_again(before).await?;
        self.recorder
            .stays_for(TWO_RELISTS, |now| {
                now.is_over().then(|| format!("the pod is {}", now.phase))
            })
            .await?;
        self.started_afresh(before).await
    }

    /// Waits until every container has written that it began again.
    pub(crate) async fn until_begun_again(&self, before: &Before) -> Result<()> {
        self.until_begun_within(before, PATIENCE).await
    }

    pub(crate) async fn until_begun_within(
        &self,
        before: &Before,
        patience: Duration,
    ) -> Result<()> {
        wait::until("all containers have begun again", patience, async || {
            let after = self.evidence_since(before)?;
            let restarting = before.restarting(self).map(|it| it.name);
            Ok(evidence::have_begun(&after, restarting))
        })
        .await
    }

    /// What its containers have noted since, with `say "note WORD"`.
    pub(crate) fn notes_since(&self, before: &Before) -> Result<Vec<String>> {
        Ok(evidence::notes(self.evidence_since(before)?))
    }

    /// How the plugin's log says that the last restart ended.
    pub(crate) fn restart_ended(&self, how: &str) -> Result<()> {
        let lines = self.plugin.log_lines(&self.name)?;
        let end = lines.iter().rfind(|line| line.contains("again, "));
        let end = end.context("no restart has ended")?;
        ensure!(end.contains(how), "{how:?} is not in {end}");
        Ok(())
    }

    /// The kubelet may see that before the plugin has said so.
    pub(crate) async fn until_restart_ended(&self, how: &str) -> Result<()> {
        wait::until("the plugin says so", PATIENCE, async || {
            let ended = self.restart_ended(how);
            Ok(ended.map_err(|error| error.to_string()))
        })
        .await
    }

    /// As its `start` in the options says.
    pub(crate) fn was_started_again_by(&self, start: &str) -> Result<()> {
        self.restart_ended(match start {
            "Kubelet" => "(no replay: start: Kubelet)",
            _ => "by replay",
        })
    }

    /// In place, once, and in order.
    async fn started_afresh(&self, before: &Before) -> Result<()> {
        self.is_the_same_pod(before).await?;
        self.was_never_over(before)?;
        self.ran_no_pre_stop_hook(before)?;
        self.inits_ran_once_in_order(before)?;
        self.started_in_spec_order(before).await?;
        self.left_nothing_behind(before).await
    }

    /// What the containers have written down since.
    pub(crate) fn evidence_since(&self, before: &Before) -> Result<Vec<Entry>> {
        Ok(self.evidence()?.split_off(before.evidence))
    }

    /// For restarts that the plugin was killed in: everything runs, and what runs is new. While there
    /// is no plugin there is no gate, so the kubelet may have gone on without the init containers.
    pub(crate) async fn has_recovered(&self, before: &Before) -> Result<()> {
        let recovered = |now: &Snapshot| {
            self.not_running(now)
                .or_else(|| before.untold_of_lasting(self, now))
        };
        self.recorder
            .until_alive("all containers run again", PATIENCE, recovered)
            .await?;
        self.until_runtime_is_tidy(&[]).await?;
        self.recorder
            .stays_for(TWO_RELISTS, recovered)
            .await
            .context("it ran, but it did not last")?;
        self.is_the_same_pod(before).await?;
        self.was_never_over(before)?;
        self.left_nothing_behind(before).await
    }

    /// All of it ran again within that time: it is not the first restart in a row, which the next waits for.
    pub(crate) fn ran_soon_after(
        &self,
        asked: Duration,
        before: &Before,
        soon: Duration,
    ) -> Result<()> {
        let evidence = self.evidence_since(before)?;
        let last = evidence.last().context("no evidence")?;
        let took = last.at.saturating_sub(asked);
        ensure!(took < soon, "it has waited for {took:?}: {evidence:?}");
        Ok(())
    }

    /// The same where the status does not tell.
    pub(crate) async fn has_recovered_unseen(&self, before: &Before) -> Result<()> {
        self.until_begun_again(before).await?;
        self.until_runtime_is_tidy(&[]).await?;
        self.is_the_same_pod(before).await?;
        self.was_never_over(before)?;
        self.left_nothing_behind(before).await
    }

    /// Under `Never`, once the kubelet has recorded an exit, it tells nothing new of the pod until that container exits again.
    pub(crate) fn is_stale_since(&self, before: &Before) -> bool {
        let regulars = || self.shape.of_kind(Kind::Regular);
        let exited = |seen: &Snapshot| {
            let mut regulars = regulars().filter_map(|it| seen.containers.get(it.name));
            regulars.any(|it| it.state.starts_with("exit "))
        };
        let seen = self.seen_since(before);
        self.shape.policy == RestartPolicy::Never && seen.iter().any(exited)
    }

    pub(crate) fn runs_anew(&self, before: &Before, containers: &[Container]) -> bool {
        self.shape.lasting().all(|it| {
            let old = before.seen_id(it.name);
            let mut running = containers
                .iter()
                .filter(|of| of.name() == it.name && of.state() == State::Running);
            running.any(|of| old.is_none_or(|old| !of.id.starts_with(old)))
        })
    }

    /// For restarts whose exits were not held, or were let go before there was a plugin again: it recovers, or a Never pod has
    /// failed, as without the plugin, or runs again with a status that is stale.
    pub(crate) async fn has_recovered_or_failed(&self, before: &Before) -> Result<()> {
        let now = wait::until("the pod runs again or has failed", PATIENCE, async || {
            let now = self.recorder.current();
            if now.is_over() || self.not_running(&now).is_none() {
                return Ok(Ok(Some(now)));
            }
            let anew =
                self.is_stale_since(before) && self.runs_anew(before, &self.containers().await?);
            Ok(if anew { Ok(None) } else { Err(now.to_string()) })
        })
        .await?;
        let Some(now) = now else {
            return Ok(());
        };
        if !now.is_over() {
            let recovered = self.has_recovered(before).await;
            // It may be that the kubelet had not yet told of the exits.
            if recovered.is_ok() || !self.recorder.current().is_over() {
                return recovered;
            }
        }
        let now = self.recorder.current();
        ensure!(
            self.shape.policy == RestartPolicy::Never && now.phase == "Failed",
            "{now}"
        );
        wait::until("nothing runs any more", PATIENCE, async || {
            let containers = self.containers().await?;
            let mut ended = containers.iter().map(|it| it.state() != State::Running);
            Ok(if ended.all(|it| it) {
                Ok(())
            } else {
                Err(format!("\n{}", describe(&containers)))
            })
        })
        .await
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
        for seen in self.seen_since(before) {
            ensure!(!seen.is_over(), "the pod was seen {}: {seen}", seen.phase);
        }
        Ok(())
    }

    /// They are for pods that end (KEP-5532), and for those that are to stop as if they did (its earlier draft).
    fn ran_no_pre_stop_hook(&self, before: &Before) -> Result<()> {
        if self.shape.asks_for("RestartPod") {
            return Ok(());
        }
        let after = self.evidence_since(before)?;
        let warned = after.iter().find(|entry| entry.deed == Deed::Warned);
        ensure!(warned.is_none(), "a preStop hook ran: {warned:?}");
        Ok(())
    }

    /// The states that a condition went through since, and when each was seen (since the epoch).
    pub(crate) fn told_since(&self, before: &Before, kind: &str) -> Vec<(Duration, Told)> {
        let moments = self.recorder.since(before.mark).into_iter();
        let told = moments.filter_map(|mut moment| {
            let told = moment.snapshot.restarting.remove(kind)?;
            Some((moment.clock, told))
        });
        let mut told: Vec<_> = told.collect();
        told.dedup_by(|now, before| now.1 == before.1);
        told
    }

    /// What the API server has published since.
    pub(crate) fn seen_since(&self, before: &Before) -> Vec<Snapshot> {
        let moments = self.recorder.since(before.mark).into_iter();
        moments.map(|moment| moment.snapshot).collect()
    }

    /// As the containers themselves wrote it down.
    pub(crate) fn inits_ran_once_in_order(&self, before: &Before) -> Result<()> {
        let after = self.evidence_since(before)?;
        let began_again: Vec<&Entry> = after
            .iter()
            .filter(|entry| matches!(entry.deed, Deed::Began | Deed::Ended))
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
            let wanted = usize::from(!before.kept.contains(&container.name));
            ensure!(
                runs.len() == wanted,
                "{} should have begun {wanted} times and began {}",
                container.name,
                runs.len()
            );
            ensure!(
                container.kind != Kind::Regular || runs.iter().all(|at| *at >= last_init),
                "{} began before the init containers were through",
                container.name
            );
        }
        Ok(())
    }

    /// As the runtime wrote it down: inits and sidecars one after another, then the regular ones.
    async fn started_in_spec_order(&self, before: &Before) -> Result<()> {
        let containers = self.containers().await?;
        let started = async |name: &str| {
            let attempts = containers.iter();
            let attempts = attempts.filter(|it| it.name() == name && !it.is_placeholder());
            let newest = attempts.max_by_key(|it| it.created_at);
            let newest = newest.with_context(|| format!("{name} is not in the runtime"))?;
            self.node.runtime.started_at(&newest.id).await
        };
        let mut newest = i64::MIN;
        for early in self
            .shape
            .containers
            .iter()
            .filter(|container| container.kind != Kind::Regular)
        {
            let at = started(early.name).await?;
            ensure!(at > newest, "{} was started before its turn", early.name);
            newest = at;
        }
        for regular in before
            .restarting(self)
            .filter(|container| container.kind == Kind::Regular)
        {
            let at = started(regular.name).await?;
            ensure!(at > newest, "{} was started before its turn", regular.name);
        }
        Ok(())
    }

    /// Neither in the runtime, nor on disk, nor in the pod's conditions.
    async fn left_nothing_behind(&self, before: &Before) -> Result<()> {
        self.until_runtime_is_tidy(before.kept).await?;
        self.until_record_is_gone(before).await?;
        self.recorder
            .until("no condition says that it restarts", PATIENCE, |now| {
                let mut told = now.restarting.iter();
                told.find(|(_, told)| told.status)
                    .map(|(kind, _)| format!("{kind} is True"))
            })
            .await?;
        Ok(())
    }

    pub(crate) async fn until_record_is_gone(&self, before: &Before) -> Result<()> {
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

    /// What the plugin's log says of the last restart that followed from this exit, if it did.
    fn decided(&self, trigger: &str, code: i32) -> Result<Option<String>> {
        let exit = format!("container={trigger} exit_code={code} ");
        let lines = self.plugin.log_lines(&self.name)?.into_iter();
        let mut decisions = lines.filter(|it| it.contains(" in place, ") && it.contains(&exit));
        Ok(decisions.next_back())
    }

    /// By events, as `kubectl describe` shows them.
    async fn restart_is_told(&self, trigger: &str, code: i32, decided: &str) -> Result<()> {
        let (begins, ends, target) = if decided.contains("one container in place") {
            ("RestartingContainer", "RestartedContainer", "container")
        } else if decided.contains("the pod in place") {
            ("RestartingPod", "RestartedPod", "pod")
        } else {
            ("RestartingAllContainers", "RestartedAllContainers", "pod")
        };
        let cause =
            format!("Container {trigger} exited with code {code}, triggering {target} restart");
        self.until_told(begins, &cause).await?;
        self.until_told(ends, "Restarted in place in ").await
    }

    /// `lastState` and `logs --previous` of the trigger, wherever its old container stays; of every container, and what
    /// started it, after a replay.
    async fn exits_are_kept(&self, before: &Before, trigger: &str, code: i32) -> Result<()> {
        if self.restart_ended("again, by replay").is_ok() {
            for container in before.restarting(self).map(|it| it.name) {
                // What there was no attempt of, the kubelet makes.
                if before.seen_id(container).is_some() {
                    self.start_is_told(container).await?;
                }
                let exit = match before.exit_of(container) {
                    _ if container == trigger => format!("exit {code} "),
                    Some(exit) => exit,
                    None => continue,
                };
                self.exit_is_kept(before, container, &exit).await?;
            }
        } else if self.shape.keeps_exit_of(trigger, code)? && !self.was_cleared_away() {
            let exit = format!("exit {code} ");
            self.exit_is_kept(before, trigger, &exit).await?;
        } else {
            return Ok(());
        }
        self.log_is_kept(before, trigger, &format!("{trigger} exits with {code}"))
            .await
    }

    async fn log_is_kept(&self, before: &Before, container: &str, line: &str) -> Result<()> {
        let log = self.previous_log(container).await;
        let kept = log.as_ref().is_ok_and(|log| log.contains(line));
        // Asked for last: it may have been collected while the log was read.
        ensure!(
            kept || self.kubelet_has_collected(before, container).await?,
            "logs --previous of {container} has {log:?}"
        );
        Ok(())
    }

    /// Of an init container the kubelet keeps the newest exit alone: it removes the others whenever it syncs the pod
    /// (`pruneInitContainersBeforeStart`, `kuberuntime_container.go`).
    async fn exit_is_kept(&self, before: &Before, container: &str, exit: &str) -> Result<()> {
        let kind = self.shape.container(container)?.kind;
        if kind == Kind::Init || self.kubelet_has_collected(before, container).await? {
            return Ok(());
        }
        self.recorder
            .until("lastState shows the exit", PATIENCE, |now| {
                let seen = now.containers.get(container)?;
                (!seen.last_state.starts_with(exit))
                    .then(|| format!("{exit}: lastState of {container} is {}", seen.last_state))
            })
            .await?;
        self.log_is_kept(before, container, &format!("{container} begins"))
            .await
    }

    /// By the events that the kubelet has of each container that it starts itself.
    async fn start_is_told(&self, container: &str) -> Result<()> {
        for (reason, done) in [("Created", "created"), ("Started", "started")] {
            let what = format!("Container {container} {done} by replay");
            self.until_told(reason, &what).await?;
        }
        Ok(())
    }

    /// Whether no old container may stay, because a kubelet that starts the pod must find none to run init containers.
    fn was_cleared_away(&self) -> bool {
        self.node.is_initialised_by_exited() && self.shape.of_kind(Kind::Init).next().is_some()
    }

    /// Once a minute the kubelet removes all dead containers of a name but the newest (`kuberuntime_gc.go`). If that
    /// minute is up between a container's creation and its start, the exit before it goes, with its log, as it does
    /// without the plugin. Only what the plugin did not remove itself is taken for this.
    async fn kubelet_has_collected(&self, before: &Before, container: &str) -> Result<bool> {
        let id = before.seen_id(container).unwrap_or_default();
        let id = id.rsplit('/').next().unwrap_or_default();
        let there = self.containers().await?.iter().any(|it| it.id == id);
        let removed = self
            .plugin
            .log_lines(&format!("Remove(ContainerId(\"{id}"))?;
        let collected = !there && removed.is_empty();
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
        self.have_restarted_alone(&before, &[container]).await?;
        // Where the kubelet does it by itself, there is nothing to tell.
        if let Some(decided) = self.decided(container, code)? {
            self.restart_is_told(container, code, &decided).await?;
        }
        self.exit_is_kept(&before, container, &format!("exit {code} "))
            .await
    }

    pub(crate) async fn have_restarted_alone(
        &self,
        before: &Before,
        containers: &[&str],
    ) -> Result<()> {
        let wrong = |now: &Snapshot| {
            for name in containers {
                let seen = now.containers.get(*name)?;
                if seen.restarts != before.restarts(name) + 1 {
                    return Some(format!("restartCount of {name} is {}", seen.restarts));
                }
            }
            self.shape
                .containers
                .iter()
                .filter(|other| !containers.contains(&other.name) && before.had_run(other.name))
                .find(|other| {
                    let id = now.containers.get(other.name).map(|seen| seen.id.as_str());
                    id != before.seen_id(other.name)
                })
                .map(|other| format!("{} was touched", other.name))
        };
        self.recorder
            .until_alive("they run again", PATIENCE, |now| {
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
        let after = self.evidence_since(before)?;
        for it in &self.shape.containers {
            let runs = after
                .iter()
                .filter(|entry| entry.container == it.name && entry.deed == Deed::Began);
            // An init container's exit comes before those after it have ever run.
            let wanted = usize::from(containers.contains(&it.name) || !before.had_run(it.name));
            let runs = runs.count();
            ensure!(
                runs == wanted,
                "{} should have begun {wanted} times and began {runs}",
                it.name
            );
        }
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
