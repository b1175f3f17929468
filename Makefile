SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

NAME       ?= reprise
K8S        ?= 1.36.3
CONTAINERD ?= 2.3.7

.PHONY: help
help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A Kubernetes node on this machine (hack/README.md)

.PHONY: node-up
node-up: ## Start a node: NAME=reprise K8S=1.36.3 CONTAINERD=2.3.7
	@hack/node.sh up $(NAME) --k8s $(K8S) --containerd $(CONTAINERD) | sed 's/^KUBECONFIG=/export &/'

.PHONY: node-down
node-down: ## End it and remove every trace: NAME=reprise
	@hack/node.sh down $(NAME)

##@ Tests (all of them; tests/scenarios/ needs real nodes and brings them up itself)

.PHONY: test
test: ## Everything, on the oldest and the newest kubelet
	@hack/test.sh

.PHONY: test-all
test-all: ## The same on all kubelets and containerds
	@hack/test.sh --all

bench: ; @hack/bench.sh ## How fast and how small, beside the kubelet's own restart: ROUNDS=5
