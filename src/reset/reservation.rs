//! The ledger in the cluster: one Lease, which every node reads and writes.
//!
//! Whoever reads it, asks the ledger and writes it back has its answer only if nobody else has written meanwhile
//! (`resourceVersion`): all answers together are as if they had been given one after another.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::time::sleep;

use super::ledger::{Claim, Ledger, Verdict};
use super::terms::Terms;
use crate::ids::PodUid;
use crate::kube::{LeaseError, SharedLease};

/// Where the Lease is, which `deploy/kustomize/components/hard-reset/rbac.yaml` makes: nobody may write there but
/// administrators and the plugin.
const NAMESPACE: &str = "kube-system";
const NAME: &str = "reprise-hard-resets";
/// The annotation of the Lease that holds the ledger.
const LEDGER: &str = "hard-resets.reprise.dev";
/// Whoever came in between has got what it wanted, and does not come again soon.
const TRIES: u32 = 20;
/// Between two tries, the shortest and the longest.
const PAUSES: Range<u64> = 10..50;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ReservationError {
    /// The Lease cannot be read or written.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// What is in it is not ours.
    #[error(
        "annotation {LEDGER} of Lease {NAMESPACE}/{NAME} cannot be read ({0}): remove the annotation"
    )]
    Unreadable(serde_json::Error),
}

/// Asks on behalf of one node.
#[derive(Debug, Clone)]
pub struct Reservations {
    lease: SharedLease,
    node: String,
}

impl Reservations {
    /// Nothing is sent yet.
    #[must_use]
    pub fn new(client: Client, node: &str) -> Self {
        Self {
            lease: SharedLease::new(client, NAMESPACE, NAME),
            node: node.to_owned(),
        }
    }

    /// Asks for a reset, which counts from then on if it is granted.
    pub async fn ask(&self, claim: &Claim, terms: &Terms) -> Result<Verdict, ReservationError> {
        self.change(|ledger, now| ledger.ask(claim, terms, now))
            .await
    }

    /// Gives back what was granted with that stamp for a pod that will not be reset now.
    pub(super) async fn withdraw(&self, pod: &PodUid, stamp: i64) -> Result<(), ReservationError> {
        self.change(|ledger, _| ledger.withdraw(pod.as_str(), stamp))
            .await
    }

    async fn change<T>(&self, how: impl Fn(&mut Ledger, i64) -> T) -> Result<T, ReservationError> {
        let mut tries = 1;
        loop {
            match self.try_once(&how).await {
                Err(ReservationError::Lease(LeaseError::Conflict)) if tries < TRIES => {
                    sleep(pause()).await;
                    tries += 1;
                }
                answer => return answer,
            }
        }
    }

    async fn try_once<T>(
        &self,
        how: impl Fn(&mut Ledger, i64) -> T,
    ) -> Result<T, ReservationError> {
        let (mut lease, now) = self.lease.read().await?;
        let mut ledger = read(&lease)?;
        let before = ledger.clone();
        let answer = how(&mut ledger, now.as_second());
        if ledger != before {
            self.write(&mut lease, &ledger, now)?;
            self.lease.replace(&lease).await?;
        }
        Ok(answer)
    }

    /// Who was the last, and when, is for people.
    fn write(
        &self,
        lease: &mut Lease,
        ledger: &Ledger,
        now: Timestamp,
    ) -> Result<(), ReservationError> {
        let text = serde_json::to_string(ledger).map_err(ReservationError::Unreadable)?;
        let annotations = lease.metadata.annotations.get_or_insert_default();
        annotations.insert(LEDGER.to_owned(), text);
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        spec.holder_identity = Some(self.node.clone());
        spec.renew_time = Some(MicroTime(now));
        Ok(())
    }
}

/// Not the same for all that came at once.
fn pause() -> Duration {
    let drawn = RandomState::new().hash_one(0);
    let Range { start, end } = PAUSES;
    Duration::from_millis(start + drawn % (end - start))
}

/// None was written yet, or somebody has cleared it.
fn read(lease: &Lease) -> Result<Ledger, ReservationError> {
    let annotations = lease.metadata.annotations.as_ref();
    match annotations.and_then(|annotations| annotations.get(LEDGER)) {
        Some(text) => serde_json::from_str(text).map_err(ReservationError::Unreadable),
        None => Ok(Ledger::default()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    use http::{Method, Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower_test::mock::pair;

    use super::*;

    const DATE: &str = "Thu, 26 Nov 2026 10:53:26 GMT";

    /// An API server with that Lease, to which writes are answered with these codes, and then with 200.
    fn server(lease: Value, codes: &[u16]) -> (Reservations, Arc<Mutex<Value>>) {
        let (service, mut handle) = pair::<Request<Body>, Response<Body>>();
        let kept = Arc::new(Mutex::new(lease));
        let (seen, mut codes) = (Arc::clone(&kept), VecDeque::from(codes.to_vec()));
        tokio::spawn(async move {
            while let Some((request, send)) = handle.next_request().await {
                let mut code = 200;
                if request.method() == Method::PUT {
                    code = codes.pop_front().unwrap_or(200);
                    let body = request.into_body().collect_bytes().await.unwrap();
                    if code == 200 {
                        *seen.lock().unwrap() = serde_json::from_slice(&body).unwrap();
                    }
                }
                let body = match code {
                    200 => seen.lock().unwrap().clone(),
                    code => json!({"status": "Failure", "code": code, "message": "no"}),
                };
                let body = Body::from(body.to_string().into_bytes());
                let answer = Response::builder().status(code).header("Date", DATE);
                send.send_response(answer.body(body).unwrap());
            }
        });
        (
            Reservations::new(Client::new(service, "default"), "node-1"),
            kept,
        )
    }

    fn lease(ledger: Option<&str>) -> Value {
        let annotations = ledger.map(|text| json!({LEDGER: text}));
        json!({"metadata": {"name": NAME, "resourceVersion": "7", "annotations": annotations}})
    }

    fn claim(pod: &str) -> Claim {
        Claim {
            owner: "d".into(),
            namespace: "n".into(),
            pod: pod.into(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_granted_is_written_and_asked_again_if_somebody_came_in_between() {
        let (reservations, kept) = server(lease(None), &[409, 409]);
        let terms = Terms::default();
        let verdict = reservations.ask(&claim("p1"), &terms).await.unwrap();
        assert!(matches!(verdict, Verdict::Granted { .. }), "{verdict:?}");
        let written = kept.lock().unwrap().clone();
        assert_eq!(written["metadata"]["resourceVersion"], "7");
        assert_eq!(written["spec"]["holderIdentity"], "node-1");
        let verdict = reservations.ask(&claim("p2"), &terms).await.unwrap();
        assert!(matches!(verdict, Verdict::Wait { .. }), "{verdict:?}");
        assert_eq!(*kept.lock().unwrap(), written);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_withdrawn_leaves_room_for_others() {
        let (reservations, kept) = server(lease(None), &[200, 409]);
        let terms = Terms::default();
        let verdict = reservations.ask(&claim("p1"), &terms).await.unwrap();
        let Verdict::Granted { stamp } = verdict else {
            panic!("{verdict:?}");
        };
        reservations.withdraw(&"p1".into(), stamp).await.unwrap();
        let verdict = reservations.ask(&claim("p2"), &terms).await.unwrap();
        assert!(matches!(verdict, Verdict::Granted { .. }), "{verdict:?}");
        // What was never granted is not there to be withdrawn.
        let written = kept.lock().unwrap().clone();
        reservations.withdraw(&"p1".into(), stamp).await.unwrap();
        assert_eq!(*kept.lock().unwrap(), written);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_granted_that_could_not_be_written() {
        let (reservations, _) = server(lease(None), &[409; 100]);
        let error = reservations.ask(&claim("p"), &Terms::default()).await;
        assert!(matches!(
            error.unwrap_err(),
            ReservationError::Lease(LeaseError::Conflict)
        ));
        let (reservations, _) = server(lease(None), &[500]);
        assert!(
            reservations
                .ask(&claim("p"), &Terms::default())
                .await
                .is_err()
        );
    }

    #[tokio::test]
    async fn a_ledger_that_cannot_be_read_is_no_empty_one() {
        let (reservations, kept) = server(lease(Some("[{}]")), &[]);
        let error = reservations.ask(&claim("p"), &Terms::default()).await;
        let text = error.unwrap_err().to_string();
        assert!(text.contains("remove the annotation"), "{text}");
        assert_eq!(*kept.lock().unwrap(), lease(Some("[{}]")));
    }
}
