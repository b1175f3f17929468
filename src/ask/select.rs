//! Which pods are meant.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject, Selector as Labels};
use kube::runtime::watcher;
use kube::{Api, Client};

use super::error::{AskError, Right};
use super::pod::Fit;
use super::target::{Kind, Selecting, Selector, Target};

/// How many pods the API server tells of at once.
const PAGE: u32 = 500;

/// The pods that are to restart.
#[derive(Debug)]
pub(super) struct Selection {
    /// By name.
    pub(super) pods: Vec<Fit>,
    /// Those that cannot, and why.
    pub(super) left_alone: Vec<(String, String)>,
    /// What tells of all of them.
    pub(super) watch: watcher::Config,
}

/// What is asked of the API server.
enum Query {
    Pod(String),
    Labels(String),
}

/// Finds the pods of targets, or of a selector.
pub(super) async fn find(
    client: &Client,
    namespace: &str,
    targets: &[Target],
    selector: Option<&Selector>,
) -> Result<Selection, AskError> {
    let mut queries = Vec::new();
    for target in targets {
        queries.push((target.to_string(), query(client, namespace, target).await?));
    }
    if let Some(selector) = selector {
        let labels = selector.as_str().to_owned();
        queries.push((format!("-l {labels}"), Query::Labels(labels)));
    }
    let watch = watch(&queries);
    let (mut pods, mut left_alone) = (BTreeMap::new(), BTreeMap::new());
    for (what, query) in queries {
        let found = match query {
            Query::Pod(name) => vec![pod(client, namespace, &name).await?],
            Query::Labels(labels) => labelled(client, namespace, &what, &labels).await?,
        };
        for (name, fit) in found {
            match fit {
                Ok(fit) if fit.named => drop(pods.insert(name, fit)),
                Ok(fit) => drop(pods.entry(name).or_insert(fit)),
                Err(why) => drop(left_alone.insert(name, why)),
            }
        }
    }
    Ok(Selection {
        pods: pods.into_values().collect(),
        left_alone: left_alone.into_iter().collect(),
        watch,
    })
}

/// One query is watched as it is. Several are not worth a watch each.
fn watch(queries: &[(String, Query)]) -> watcher::Config {
    let config = watcher::Config::default();
    match queries {
        [(_, Query::Pod(name))] => config.fields(&format!("metadata.name={name}")),
        [(_, Query::Labels(labels))] => config.labels(labels),
        _ => config,
    }
}

async fn query(client: &Client, namespace: &str, target: &Target) -> Result<Query, AskError> {
    let name = &target.name;
    Ok(match target.kind {
        Kind::Pod => Query::Pod(name.clone()),
        Kind::Labelled(labelled) => Query::Labels(format!("{}={name}", labelled.label())),
        Kind::Selecting(selecting) => {
            let labels = selector(client, namespace, target, selecting).await?;
            Query::Labels(labels)
        }
    })
}

/// By which labels it knows its pods.
async fn selector(
    client: &Client,
    namespace: &str,
    target: &Target,
    selecting: Selecting,
) -> Result<String, AskError> {
    let resource = match selecting {
        Selecting::Deployment => ApiResource::erase::<Deployment>(&()),
        Selecting::StatefulSet => ApiResource::erase::<StatefulSet>(&()),
        Selecting::DaemonSet => ApiResource::erase::<DaemonSet>(&()),
    };
    let right = Right {
        verb: "get",
        resource: selecting.resource(),
        namespace: Some(namespace.to_owned()),
    };
    let api = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &resource);
    let found = right.used(api.get_opt(&target.name)).await?;
    let found = found.ok_or_else(|| AskError::NoSuch {
        what: target.to_string(),
        namespace: namespace.to_owned(),
    })?;
    let selector = found.data["spec"]["selector"].clone();
    let selector = serde_json::from_value::<LabelSelector>(selector).ok();
    let selector = selector.and_then(|selector| Labels::try_from(selector).ok());
    // The API server takes none that selects everything.
    let selector = selector.filter(|selector| !selector.selects_all());
    let selector = selector.ok_or_else(|| no_match(target.to_string(), Some(namespace)))?;
    Ok(selector.to_string())
}

type Found = (String, Result<Fit, String>);

/// A pod that was named: it must be there, and fit.
async fn pod(client: &Client, namespace: &str, name: &str) -> Result<Found, AskError> {
    let found = get(client, namespace, name).await?;
    match Fit::from_pod(&found, true) {
        Ok(fit) => Ok((name.to_owned(), Ok(fit))),
        Err(why) => Err(AskError::Unfit {
            pod: name.to_owned(),
            why,
        }),
    }
}

/// Pods that were selected: one at least must be there, and fit.
async fn labelled(
    client: &Client,
    namespace: &str,
    what: &str,
    labels: &str,
) -> Result<Vec<Found>, AskError> {
    let found = list(client, Some(namespace), Some(labels)).await?;
    let found: Vec<Found> = found
        .iter()
        .map(|pod| {
            let name = pod.metadata.name.clone().unwrap_or_default();
            (name, Fit::from_pod(pod, false))
        })
        .collect();
    if found.is_empty() {
        return Err(no_match(what.to_owned(), Some(namespace)));
    }
    if found.iter().all(|(_, fit)| fit.is_err()) {
        let reasons = found.iter().filter_map(|(name, fit)| {
            let why = fit.as_ref().err()?;
            Some(format!("{name} {why}"))
        });
        return Err(AskError::NoneFit {
            what: what.to_owned(),
            pods: crate::text::listed(&reasons.collect::<Vec<_>>()),
        });
    }
    Ok(found)
}

pub(super) fn no_match(what: String, namespace: Option<&str>) -> AskError {
    AskError::NoMatch {
        what,
        namespace: namespace.map(str::to_owned),
    }
}

/// The pod of that name.
pub(super) async fn get(client: &Client, namespace: &str, name: &str) -> Result<Pod, AskError> {
    let right = Right::pods("get", namespace);
    let api = Api::<Pod>::namespaced(client.clone(), namespace);
    let found = right.used(api.get_opt(name)).await?;
    found.ok_or_else(|| AskError::NoSuch {
        what: format!("pod {name}"),
        namespace: namespace.to_owned(),
    })
}

/// All pods of a namespace, or of all, or those of them with these labels.
pub(super) async fn list(
    client: &Client,
    namespace: Option<&str>,
    labels: Option<&str>,
) -> Result<Vec<Pod>, AskError> {
    let right = Right {
        verb: "list",
        resource: "pods",
        namespace: namespace.map(str::to_owned),
    };
    let api = match namespace {
        Some(namespace) => Api::<Pod>::namespaced(client.clone(), namespace),
        None => Api::<Pod>::all(client.clone()),
    };
    let mut params = ListParams::default().limit(PAGE);
    params.label_selector = labels.map(str::to_owned);
    let mut pods = Vec::new();
    loop {
        let page = right.used(api.list(&params)).await?;
        pods.extend(page.items);
        params.continue_token = page.metadata.continue_.filter(|it| !it.is_empty());
        if params.continue_token.is_none() {
            return Ok(pods);
        }
    }
}

#[cfg(test)]
mod tests;
