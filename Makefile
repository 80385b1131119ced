# Every target works from a fresh clone: the tools it needs are built at the
# versions below, once, into a cache outside of the tree. `make help` lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --warn-undefined-variables --no-builtin-rules --no-print-directory

BUF_VERSION                := v1.75.0
PROTOC_GEN_GO_VERSION      := v1.36.12
PROTOC_GEN_GO_GRPC_VERSION := v1.6.2
GOLANGCI_LINT_VERSION      := v2.15.0
GOFUMPT_VERSION            := v0.12.0

# A directory per tool and version, so that a change of version above rebuilds;
# and per Go version, as a linter built by an older Go refuses newer code.
TOOLS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/belay/tools/$(shell go env GOVERSION)

BUF                := $(TOOLS)/buf-$(BUF_VERSION)/buf
PROTOC_GEN_GO      := $(TOOLS)/protoc-gen-go-$(PROTOC_GEN_GO_VERSION)/protoc-gen-go
PROTOC_GEN_GO_GRPC := $(TOOLS)/protoc-gen-go-grpc-$(PROTOC_GEN_GO_GRPC_VERSION)/protoc-gen-go-grpc
GOLANGCI_LINT      := $(TOOLS)/golangci-lint-$(GOLANGCI_LINT_VERSION)/golangci-lint
GOFUMPT            := $(TOOLS)/gofumpt-$(GOFUMPT_VERSION)/gofumpt

# buf finds its plugins by name.
GENERATE := PATH="$(dir $(PROTOC_GEN_GO)):$(dir $(PROTOC_GEN_GO_GRPC)):$$PATH" $(BUF) generate

# The modules of the tree. `go test ./...` stops at a module's border, so all
# that tests or lints goes through this list.
MODULES := . $(patsubst %/go.mod,%,$(wildcard examples/go.mod))

# How long each fuzz target runs.
FUZZTIME ?= 10s

# $(call each-module,COMMAND) runs COMMAND in every module and says where.
define each-module
for module in $(MODULES); do
	echo "== $$module: $(1)"
	(cd "$$module" && $(1))
done
endef

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# Built and then become the program, not `go run`, which hands no SIGTERM on.
define run-example
cd examples
mkdir -p "$(TOOLS)"
go build -o "$(TOOLS)/example-$(1)" ./$(1)
exec "$(TOOLS)/example-$(1)" $(2)
endef

.PHONY: demo
demo: ## Run the call chain and show what survives
	@$(call run-example,chain,)

.PHONY: test
test: ## Build, vet and test everything
	@$(call each-module,go build ./...)
	$(call each-module,go vet ./...)
	$(call each-module,go test ./...)

.PHONY: test-short
test-short: ## Run the tests that need no servers and little time
	@$(call each-module,go test -short ./...)

.PHONY: race
race: ## Run all tests with the race detector
	@$(call each-module,go test -race ./...)

.PHONY: fuzz
fuzz: ## Fuzz every target for FUZZTIME (10s) each
	@internal/tools/fuzz.sh "$(FUZZTIME)" $(MODULES)

.PHONY: bench
bench: ## Measure Belay and its peers in one run
	@cd examples
	go run ./bench
	go run ./benchsql

.PHONY: lab
lab: ## Run the experiments and write them to one page
	@$(call run-example,lab,-check)

.PHONY: chaos
chaos: ## Kill servers at every step of a keyed call and count what was done twice
	@$(call run-example,chaos,-check)

.PHONY: lint
lint: $(BUF) $(GOLANGCI_LINT) $(GOFUMPT) ## Check style, protos, go.mod files and code
	@$(BUF) lint
	$(BUF) format --diff --exit-code
	unformatted=$$($(GOFUMPT) -l .)
	if [[ -n $$unformatted ]]; then printf 'not formatted by gofumpt:\n%s\n' "$$unformatted" >&2; exit 1; fi
	$(call each-module,go mod tidy -diff)
	$(call each-module,$(GOLANGCI_LINT) run ./...)

.PHONY: generate
generate: $(BUF) $(PROTOC_GEN_GO) $(PROTOC_GEN_GO_GRPC) ## Generate the code of all protos
	@$(GENERATE)

.PHONY: checkgenerate
checkgenerate: $(BUF) $(PROTOC_GEN_GO) $(PROTOC_GEN_GO_GRPC) ## Fail if generated code differs from its protos
	@out=$$(mktemp -d)
	trap 'rm -rf "$$out"' EXIT
	$(GENERATE) --output "$$out"
	internal/tools/samegenerated.sh "$$out"

# install-tool NAME,PACKAGE@VERSION: built aside and moved, so that an interrupted
# build, or a second make beside this one, leaves no half of a binary.
define install-tool
@echo "building $(1)"
mkdir -p $(@D)
aside=$$(mktemp -d $(@D)/build.XXXXXX)
trap 'rm -rf "$$aside"' EXIT
GOBIN="$$aside" GOFLAGS= go install $(1)
mv "$$aside/$(@F)" $@
endef

$(BUF):
	$(call install-tool,github.com/bufbuild/buf/cmd/buf@$(BUF_VERSION))

$(PROTOC_GEN_GO):
	$(call install-tool,google.golang.org/protobuf/cmd/protoc-gen-go@$(PROTOC_GEN_GO_VERSION))

$(PROTOC_GEN_GO_GRPC):
	$(call install-tool,google.golang.org/grpc/cmd/protoc-gen-go-grpc@$(PROTOC_GEN_GO_GRPC_VERSION))

$(GOLANGCI_LINT):
	$(call install-tool,github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION))

$(GOFUMPT):
	$(call install-tool,mvdan.cc/gofumpt@$(GOFUMPT_VERSION))
