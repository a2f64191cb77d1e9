# Kinference. `make help` lists the targets.
SHELL := /bin/bash
export CGO_ENABLED ?= 1
MODULES := proto api deploy/charts internal services/accounting services/classifier services/ingress services/kvtracker services/limiter services/router cmd test
SERVICES := ingress router kvtracker limiter classifier accounting
TOOLS := bin/.tools

.PHONY: help build demo dev newcomer test test-go interop interop-vllm bench bench-quick bench-vllm eval-classifier chaos fuzz generate lint check tidy images release clean

help: ## List the targets.
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## Build all binaries into bin/.
	@mkdir -p bin
	CGO_ENABLED=0 go build -o bin/ ./cmd/kinference ./cmd/kinfctl ./cmd/fleetsim $(foreach s,$(SERVICES),./services/$(s)/cmd/$(s))
	CGO_ENABLED=0 go build -o bin/kinbench ./test/bench/cmd/bench

demo: ## Run the demo: three simulated workers, before and after; writes out/demo.json.
	@mkdir -p bin out
	@CGO_ENABLED=0 go build -o bin/ ./cmd/kinference
	bin/kinference demo --out out

dev: ## Serve in front of a simulated fleet, until interrupted.
	@mkdir -p bin
	@CGO_ENABLED=0 go build -o bin/ ./cmd/kinference ./cmd/kinfctl ./cmd/fleetsim
	scripts/dev.sh

newcomer: ## Time the way to a first token and a first refusal, on a fresh clone (COLD=1: empty build cache).
	scripts/newcomer.sh

test: ## Install what the tests need, then run all of them (what CI runs).
	scripts/test.sh

test-go: ## Run the Go tests only, with what is installed.
	go vet work
	go test -race work

interop: ## Regenerate and compare what other implementations say (Node, libzmq).
	scripts/interop.sh

interop-vllm: ## Run the tests with real vLLM engines (RUN=TestX for one).
	scripts/interop-vllm.sh $(if $(RUN),-run '$(RUN)')

bench: build ## Run all benchmarks and rewrite docs/benchmarks.
	bin/kinbench full --docs docs/benchmarks --out out

bench-quick: build ## Write out/bench.json in at most a minute.
	@mkdir -p out
	bin/kinbench quick --out out

bench-vllm: ## Measure on real vLLM engines with GuideLLM; rewrites docs/benchmarks/vllm.md.
	scripts/bench-vllm.sh

eval-classifier: ## Measure the classifier on labelled files (FILES; PRESIDIO=1 beside Presidio).
	scripts/eval-classifier.sh $(FILES)

chaos: ## Let every part fail under load, and restart all in turn; rewrites docs/benchmarks/chaos.md. Needs root on Linux.
	go test ./test/chaos -count=1 -timeout 25m -v -full $(if $(RATE),-rate $(RATE)) -docs $(CURDIR)/docs/benchmarks -out $(CURDIR)/out

fuzz: ## Run every fuzz target for FUZZTIME (default 60s).
	scripts/fuzz.sh $(or $(FUZZTIME),60s)

generate: $(TOOLS) ## Regenerate the code of proto/, deepcopy and CRDs of api/.
	bin/buf generate
	scripts/api.sh

lint: $(TOOLS) bin/golangci-lint ## Lint Go and proto.
	bin/buf lint
	bin/buf breaking --against proto/baseline.binpb
	bin/golangci-lint run $$(go list -m -f '{{.Dir}}/...')

check: generate tidy lint test ## Everything that must hold before a change lands, and a clean tree.
	git diff --exit-code

tidy: ## Tidy every module.
	go work sync
	for m in $(MODULES); do (cd $$m && GOWORK=off go mod tidy) || exit 1; done

images: ## Build the images of all services into out/images, without a container engine.
	go run ./cmd/images --out out/images $(if $(VERSION),--version $(VERSION))

release: ## Build a release (VERSION=0.1.0) into out/release: images, charts, kinfctl, checksums.
	scripts/release.sh $(or $(VERSION),0.1.0)

clean: ## Remove what was built.
	rm -rf bin out

$(TOOLS): tools/go.mod tools/buf/go.mod
	scripts/tools.sh
	@touch $@

bin/golangci-lint: tools/lint/go.mod
	GOBIN=$(CURDIR)/bin GOWORK=off go -C tools/lint install tool
