# One line for each news of the pod: its phase, whether all containers that stay are ready, whether
# every container has been restarted, and both for people. Tabs between.
.object
| (.spec.initContainers | map(select(.restartPolicy == "Always").name)) as $sidecars
| (.status.initContainerStatuses // []) as $init
| (.status.containerStatuses // []) as $regular
| ($init + $regular) as $all
| ($regular + [$init[] | select(.name as $name | $sidecars | index($name))]) as $lasting
| select($all | length > 0)
| [
    .status.phase,
    ($lasting | all(.ready)),
    ($all | all(.restartCount > 0)),
    "\($lasting | map(select(.ready)) | length)/\($lasting | length) ready, \(.status.phase), restarts: "
      + ($all | map("\(.name) \(.restartCount)") | join(", "))
  ]
| @tsv
