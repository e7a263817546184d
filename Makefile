# kmirror. `make test` does everything on a fresh machine; `make demo` shows it. Variables can be set: make fuzz FUZZTIME=5m

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
FUZZTIME ?= 20s
TIMEOUT ?= 60m
DEMO ?=
# Packages whose tests run at a time: the end-to-end tests mostly wait.
PACKAGES ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 3 / 2)

.PHONY: build test race fuzz bench e2e suites lint check demo deps modules kafka debian-packages clean

build: ## bin/kmirror, one static binary
	CGO_ENABLED=0 go build -trimpath -ldflags "-X main.version=$(VERSION)" -o bin/kmirror ./cmd/kmirror

test: build deps ## all tests, on kfake and on real Kafka
	go test -count=1 -timeout $(TIMEOUT) -p $(PACKAGES) ./...

race: build deps ## all but the end-to-end tests under the race detector
	go test -count=1 -timeout $(TIMEOUT) -race $$(go list ./... | grep -v /test/)

fuzz: ## every fuzz test for $(FUZZTIME)
	@grep -rnoE '^func Fuzz\w+' --include='*_test.go' . | sed -E 's,^(.*)/[^/]+:func (\w+)$$,\1 \2,' | while read -r dir name; do \
	go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$dir" || exit 1; done

bench: build deps ## kmirror side by side with its peers
	go test -count=1 -timeout 2h -v -run TestBench ./test/bench -kmirror.bench

e2e: build deps ## the end-to-end tests alone, each named
	go test -count=1 -timeout $(TIMEOUT) -v ./test/...

suites: build deps ## franz-go's own test suites, through the proxy and directly
	go test -count=1 -timeout $(TIMEOUT) -v -run TestSuites ./test/matrix -kmirror.suites

lint: ## go vet, and the repository's own rules
	go vet ./...
	go test -count=1 ./internal/lint

check: lint test race ## what must pass before a change is taken

demo: build ## two clusters in one process, the proxy between them, a producer
	bin/kmirror demo $(DEMO)

# What the tests need, each fetched once, into .cache. Without root it only says which Debian packages are missing.

deps: debian-packages modules kafka .cache/venv/done .cache/librdkafka-1.6/done .cache/node/done

modules: ## Go modules
	go mod download
	cd test/clients/sarama && go mod download

kafka: ## Apache Kafka's jars
	@mkdir -p .cache
	@go test -count=1 -run TestKafkaIsInstalled -timeout 20m ./internal/kafkatest >.cache/kafka.out 2>&1 || { cat .cache/kafka.out; exit 1; }

.cache/venv/done: test/clients/requirements.txt ## Python clients
	python3 -m venv --clear .cache/venv && .cache/venv/bin/pip install -q --disable-pip-version-check -r $<
	touch $@

.cache/librdkafka-1.6/done: .cache/venv/done ## an old librdkafka for Debian's kcat and Python, from a wheel for an older Python; there's none but for x86-64
	-.cache/venv/bin/pip install -q --disable-pip-version-check --upgrade --target $(@D) --no-deps --only-binary :all: --python-version 3.8 confluent-kafka==1.6.0 && \
	ln -sf confluent_kafka.libs/librdkafka-1b9b7dd2.so.1 $(@D)/librdkafka.so.1 && touch $@

.cache/node/done: test/clients/package-lock.json ## Node clients
	mkdir -p .cache/node && cp test/clients/package.json $< .cache/node && npm ci --silent --no-audit --no-fund --prefix .cache/node
	touch $@

debian-packages: ## kcat, Java and its compiler, Maven, Python, Node and a KDC, where their commands are missing
	@test/clients/debian-packages kcat=kcat java=openjdk-17-jre-headless javac=openjdk-17-jdk-headless mvn=maven python3=python3-venv npm=npm \
		krb5kdc=krb5-kdc kadmin.local=krb5-admin-server /usr/lib/python3/dist-packages/confluent_kafka=python3-confluent-kafka

clean: ## all that was built or fetched
	rm -rf bin .cache
