SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

NAME       ?= reprise
# By default each script's own: K8S (1.33.13, 1.34.4, 1.35.4, 1.36.3, 1.37.2), CONTAINERD (1.7.35, 2.3.7, 2.4.2).
VERSIONS    = $(if $(K8S),--k8s $(K8S)) $(if $(CONTAINERD),--containerd $(CONTAINERD))

.PHONY: help
help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## See a pod restart in place, on a real node that it brings up itself: K8S=1.33.13
	@K8S=$(K8S) CONTAINERD=$(CONTAINERD) hack/demo.sh

.PHONY: build
build: ## The plugin, as it is shipped
	@cargo build --release --locked

.PHONY: image
image: ## The static executable, the image for amd64 and arm64, and what they are made of: ARCH=amd64
	@hack/image.sh $(if $(ARCH),--arch $(ARCH))

.PHONY: package
package: ## A Debian package of the executable, its manual and the systemd unit
	@hack/package.sh

# A Kubernetes node on this machine (hack/README.md)

.PHONY: node-up
node-up: ## Start a node: NAME=reprise K8S=1.37.2 CONTAINERD=2.4.2
	@hack/node.sh up $(NAME) $(VERSIONS) | sed 's/^KUBECONFIG=/export &/'

.PHONY: node-down
node-down: ## End it and remove every trace: NAME=reprise
	@hack/node.sh down $(NAME)

.PHONY: installed
installed: ## Image and chart on a node of its own: install, replace while pods restart, remove
	@hack/installed.sh

# tests/scenarios/ needs real nodes and brings them up itself.

.PHONY: test
test: ## Everything, on the oldest or the newest kubelet: SEED=N
	@hack/test.sh $(if $(SEED),--seed $(SEED))

.PHONY: test-all
test-all: ## Everything on all kubelets and runtimes, and in a virtual machine: a day
	@hack/test.sh --all
	@hack/image.sh --check
	@hack/metrics.sh check
	@$(MAKE) --no-print-directory installed
	@$(MAKE) --no-print-directory soak MINUTES=10
	@$(MAKE) --no-print-directory vm-test

.PHONY: sim
sim: ## Restarts in the simulator: CASES=1000000 SEED=N
	@seed=$(or $(SEED),$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')); echo "seed $$seed"; \
		PROPTEST_RNG_SEED=$$seed PROPTEST_CASES=$(or $(CASES),1000000) \
		cargo test --locked --release --package reprise --lib -- --nocapture sim::

.PHONY: planted
planted: ## Whether the simulator finds bugs that are put in
	@hack/planted.sh

.PHONY: soak
soak: ## Restarts while the plugin, the kubelet or the runtime ends at any instant: MINUTES=30 SEED=N
	@hack/test.sh --only-scenarios --parts 1 1.36.3/2.3.7/1.33.13 1.36.3/2.3.7 -- \
		--soak $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

.PHONY: vm-test
vm-test: ## In a virtual machine with systemd and cgroup v2: reboots, units, all scenarios: DEBIAN=12 SEED=N IDLE=5
	@hack/vm-test.sh --scenarios all $(if $(DEBIAN),--debian $(DEBIAN)) $(if $(SEED),--seed $(SEED)) \
		$(if $(IDLE),--idle $(IDLE)) $(VERSIONS)

.PHONY: bench
bench: ## How fast and how small, beside the kubelet's own restart and a new pod: ROUNDS=10
	@hack/bench.sh

.PHONY: critest
critest: ## The CRI's own tests without the plugin and with it: CONTAINERD=2.4.2 SEED=N
	@hack/critest.sh $(if $(CONTAINERD),--containerd $(CONTAINERD)) $(if $(SEED),--seed $(SEED))

.PHONY: fuzz
fuzz: ## Mutated input from everybody whom the plugin listens to, each kind for MINUTES=60
	@hack/fuzz.sh --seconds $$(($(or $(MINUTES),60) * 60))

.PHONY: chart
chart: ## The Helm chart: lint, render, and whether deploy/kustomize is made from it
	@hack/chart.sh check

.PHONY: metrics
metrics: ## Metrics, alert rules and dashboard, as promtool reads them
	@hack/metrics.sh check

.PHONY: lint
lint: ## Format, lints, documentation, the oldest compiler, dependencies, what would be published, scripts
	@hack/lint.sh
