//! The `DaemonSet` that runs the plugin, of which nothing but its being there matters.

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::api::DeleteParams;
use kube::{Api, Client, Error};

use crate::config::DaemonSetName;

/// One `DaemonSet`.
#[derive(Debug)]
pub(crate) struct DaemonSets {
    api: Api<DaemonSet>,
    name: String,
}

impl DaemonSets {
    /// Nothing is sent yet.
    pub(crate) fn new(client: Client, name: &DaemonSetName) -> Self {
        Self {
            api: Api::namespaced(client, &name.namespace),
            name: name.name.clone(),
        }
    }

    /// Whether it is being deleted, or is gone.
    pub(crate) async fn is_being_removed(&self) -> Result<bool, Error> {
        let found = self.api.get_metadata_opt(&self.name).await?;
        Ok(found.is_none_or(|it| it.metadata.deletion_timestamp.is_some()))
    }

    /// Whether it is gone. While it is deleted in the foreground, it stays for as long as its pods.
    pub(crate) async fn is_gone(&self) -> Result<bool, Error> {
        Ok(self.api.get_metadata_opt(&self.name).await?.is_none())
    }

    /// Deletes it in the foreground: its pods can tell from it that no others follow. One that is gone is no error.
    pub(crate) async fn remove(&self) -> Result<(), Error> {
        match self
            .api
            .delete(&self.name, &DeleteParams::foreground())
            .await
        {
            Ok(_) => Ok(()),
            Err(Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error),
        }
    }
}
