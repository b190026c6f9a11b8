"""Mistakes of users at the start, each with the one line that cures it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router_core.cli import main

#: In the working directory of each test. A name that ends with ``/`` is a directory.
FILES = {
    "bad.conf": "prot = 7\n",
    "cache.conf": "hf-checkpoint = /x\n",
    "value.conf": "port = many\n",
    "range.conf": "port = 99999\n",
    "list.conf": "plugin:\n - openai\n",
    "junk.conf": "{{{\n",
    "plain.txt": "x",
    "open.conf": "plugin = [radix_cache, openai\n",
    "two.conf": "worker-urls = http://a:1 http://b:2\n",
    "switch.conf": "dp-aware = 3\n",
    "empty/": "",
}

LISTED = "(installed: "
WORKER_URL = "--worker-urls: wanted a worker URL such as http://10.0.0.7:30001, without a path;"
HOST = "--host: wanted a name or an address such as 0.0.0.0, without scheme and port;"

#: ``(mistake, beginning of the line)``. A word with ``=`` before the first flag is a variable of the environment.
MISTAKES = {
    # flags
    "--prot 7": "unknown flag --prot: did you mean --port?",
    "-port 7": "unknown flag -port: did you mean --port?",
    "--worker_urls http://a:1": "unknown flag --worker_urls: did you mean --worker-urls?",
    "--worker-url http://a:1": "unknown flag --worker-url: did you mean --worker-urls?",
    "--plugins radix_cache": "unknown flag --plugins: did you mean --plugin?",
    "--Policy random": "unknown flag --Policy: did you mean --policy?",
    "--worker http://a:1": "unknown flag --worker: did you mean --worker-urls URL?",
    "--tp-size 2": "--tp-size is for engines: give it to sglang.launch_server, and its address to --worker-urls",
    "--mem-fraction-static=0.8": "--mem-fraction-static is for engines: give it to sglang.launch_server",
    "--model /x": "--model is for engines: give it to sglang.launch_server, and its address to --worker-urls",
    "-p 3000": "unknown flag -p: did you mean --port or --plugin?",
    "-v": "unknown flag -v: did you mean --log-level debug?",
    "engine -p 3000": "unknown flag -p: did you mean --port? (slime-router engine --help shows all flags)",
    "--verbose": "unknown flag --verbose: did you mean --log-level debug?",
    "--nonsense=secret": "unknown flag --nonsense (--help shows all flags)",
    "--hf-checkpoint /x": "--hf-checkpoint belongs to the plugin radix_cache, which is not loaded:"
    " add --plugin radix_cache",
    "--radix-tree-max-sise 3": "unknown flag --radix-tree-max-sise: did you mean"
    " --radix-tree-max-size? (it belongs to the"
    " plugin radix_cache, which is not loaded: add --plugin radix_cache)",
    "--no-default-plugins --api-key k": "--api-key (SLIME_ROUTER_API_KEY) belongs to the plugin"
    " auth, which is not"
    " loaded: add --plugin auth",
    # values
    "--port": "--port: wanted a value after it",
    "--port=": "--port: wanted a whole number, got ''",
    "--port 30000x": "--port: wanted a whole number, got '30000x'",
    "--port 99999": "--port: wanted 0 to 65535, got 99999",
    "--port 1 2": "--port: a value too many; put a value that has spaces in quotes",
    "--api-key my secret": "--api-key: a value too many; put a value that has spaces in quotes",
    "--max-payload-size 512MB": "--max-payload-size BYTES: wanted a whole number, got '512MB'",
    "--request-timeout-secs 30s": "--request-timeout-secs S: wanted a number, got '30s'",
    "--health-check-interval-secs 0": "--health-check-interval-secs: wanted a number above 0, got 0.0",
    "--disable-health-check true": "--disable-health-check: a switch takes no value; give it alone",
    "--dp-aware=yes": "--dp-aware: a switch takes no value; give it alone",
    "--policy best": "--policy: no such value 'best'; known: auto, least_inflight, ",
    "--policy cache-aware": "--policy: no such value 'cache-aware': did you mean cache_aware? known: auto, ",
    "--host=": f"{HOST} got ''",
    "--host http://0.0.0.0": f"{HOST} got 'http://0.0.0.0'",
    "--host 0.0.0.0:30000": f"{HOST} got '0.0.0.0:30000'",
    "--prometheus-host http://a --prometheus-port 0": f"--prometheus{HOST[1:]} got 'http://a'",
    "\N{EN DASH}port 7": "a flag begins with two hyphens, and not with the dash '\N{EN DASH}': --port",
    "--dp-aware \N{EM DASH}api-key=secret": "a flag begins with two hyphens, and not with the dash '\N{EM DASH}':"
    " --api-key",
    "--cors-allowed-origins example.com": "--cors-allowed-origins: wanted an origin such as"
    " https://app.example.com, without a path, or *; got 'example.com'",
    "--cors-allowed-origins https://example.com/": "--cors-allowed-origins: wanted an origin such as",
    "--dashboard-path /generate": "--dashboard-path: the path /generate is taken, since the router or an engine",
    "--dashboard-path /tokenize": "--dashboard-path: the path /tokenize is taken, since the router or an engine",
    "--prometheus-duration-buckets 1 0.5": "--prometheus-duration-buckets: wanted at most 100 ascending numbers of",
    "--allow-worker 10.0.0.0/33": "--allow-worker: wanted [scheme://]host[:port], where host is a name",
    "--request-id-headers a:b": "--request-id-headers: wanted names of headers, got 'a:b'",
    "--log-level INFO": "--log-level: no such value 'INFO': did you mean info? known: debug, info,"
    " warn, error",
    "--plugin r3 --r3-shape 3": "--r3-shape LAYERS TOP_K: wanted 2 values after it",
    "--control-plane-api-keys x": "--control-plane-api-keys: wanted id:name:role:key, with the role"
    " admin or user",
    "--api-key käse": "--api-key: wanted a key of visible ASCII characters, without spaces",
    "--service-discovery": "--service-discovery: wanted the labels of worker pods, by --selector"
    " key=value ...",
    "--mini-lb": "--mini-lb: wanted --pd-disaggregation, --prefill and --decode with it",
    "--tls-cert-path plain.txt": "--tls-cert-path is given without --tls-key-path; give both",
    "--plugin engine --engine-workers 0": "--engine-workers must be at least 1, got 0",
    "--plugin engine --engine-backend vllm": "--engine-backend must be one of ngram, transformers,"
    " got 'vllm'",
    "--plugin engine --engine-model x": "--engine-model and backend transformers go together: give"
    " both, or none; got ",
    # plugins, and their order
    "--plugin radix-cache": f"no plugin 'radix-cache': did you mean radix_cache? {LISTED}",
    "--plugin slime_radix_cache": f"no plugin 'slime_radix_cache': did you mean radix_cache? {LISTED}",
    "--plugin tiered_store": "tiered_store needs --plugin radix_cache (no plugin provides the component",
    "--plugin nonsense": f"no plugin 'nonsense' {LISTED}",
    "--plugin openai,radix_cache": "no plugin 'openai,radix_cache': give one name each, --plugin"
    " openai --plugin"
    " radix_cache, or [openai, radix_cache] in a file or a variable",
    "--plugin [radix_cache": "--plugin: wanted ] at the end of the list, got '[radix_cache'",
    "--plugin my.module": f"no plugin 'my.module': a dotted path belongs after --middleware-paths {LISTED}",
    "--plugin radix_cache": "radix_cache needs --hf-checkpoint PATH, or --plugin engine (no plugin"
    " provides the"
    " component 'tokenizer')",
    "--plugin openai": "openai needs --plugin radix_cache (no plugin provides the component 'encoder')",
    "--plugin openai --plugin engine": "openai needs --plugin radix_cache (no plugin provides",
    "--no-default-plugins --plugin models --enable-igw": "models needs --plugin sglang (no plugin provides",
    "--plugin engine --plugin radix_cache --hf-checkpoint empty": "--hf-checkpoint: another plugin"
    " offers a tokenizer"
    " already: leave the flag out, or put --plugin radix_cache before --plugin engine",
    "--middleware-paths sglang": "--middleware-paths sglang: ModuleNotFoundError: No module named 'sglang';"
    " it is a plugin: --plugin sglang",
    "--middleware-paths nowhere.Plugin": "--middleware-paths nowhere.Plugin: ModuleNotFoundError: No"
    " module named"
    " 'nowhere'; is its directory in PYTHONPATH?",
    "--middleware-paths ./plugin.py": "--middleware-paths ./plugin.py: TypeError: the 'package'"
    " argument is required to"
    " perform a relative import for './plugin.py'; wanted a dotted path such as package.module.Class,"
    " with its",
    "--middleware-paths router_core.errors.py": "--middleware-paths router_core.errors.py: AttributeError: module"
    " 'router_core.errors' has no attribute 'py'; wanted a dotted path such as package.module.Class",
    "--middleware-paths slime_metrics": "plugin 'slime_metrics' failed in add_options: ArgumentError: argument"
    " --prometheus-port: conflicting option string: --prometheus-port; metrics has it already: is one plugin"
    " loaded twice?",
    "--plugin r3 --middleware-paths slime_r3": "plugin 'slime_r3' failed in add_options: ArgumentError: argument"
    " --r3-inject: conflicting option string: --r3-inject; r3 has it already: is one plugin loaded twice?",
    "--middleware-paths router_core.errors": "plugin 'router_core.errors' has no hooks; known: add_options, ",
    # files
    "--config nowhere.conf": "--config nowhere.conf: No such file or directory; wanted a text file with a line such as"
    " port = 30000 for each flag (--help shows the names)",
    "--config empty": "--config empty: Is a directory; wanted a text file with a line such as port = 30000 for each",
    "--config bad.conf": "bad.conf: unknown key prot: did you mean port?",
    "--config cache.conf": "cache.conf: hf-checkpoint belongs to the plugin radix_cache, which is"
    " not loaded: add",
    "--config value.conf": "--port: wanted a whole number, got 'many' (in value.conf)",
    "--config range.conf": "--port: wanted 0 to 65535, got 99999 (in range.conf)",
    "--config open.conf": "--plugin: wanted ] at the end of the list, got '[radix_cache, openai'",
    "--config two.conf": f"{WORKER_URL} got 'http://a:1 http://b:2'; put spaces between several URLs, or write [URL,",
    "--config switch.conf": "Unexpected value for dp-aware: '3'. Expecting 'true', 'false',",
    "--config list.conf": f"--plugin: wanted a name, got '' {LISTED}",
    "--config junk.conf": "junk.conf: unknown key '{{{'; wanted name = value (--help shows the names)",
    "--log-dir plain.txt": "--log-dir: wanted a directory, got plain.txt: File exists",
    "--plugin state": "--plugin state needs --state-dir DIR, the directory to keep the workers in",
    "--plugin state --state-dir plain.txt": "--state-dir: wanted a directory, got plain.txt: File exists",
    "--plugin engine --plugin radix_cache --trajectory-log plain.txt": "--trajectory-log: wanted a"
    " directory, got plain.txt:",
    "--plugin engine --plugin radix_cache --plugin tiered_store --host 127.0.0.1 --port 0 --store-ssd ssd"
    " --store-ssd-bytes 999999 --store-remote file:///nowhere --store-remote-bytes 99999": "--store-remote-bytes"
    " 99999: wanted at least ",
    "--host 127.0.0.1 --port 0 --tls-cert-path plain.txt --tls-key-path plain.txt": "--tls-cert-path and"
    " --tls-key-path: a file has no certificate, or no key, in PEM form; are they swapped?",
    "--ca-cert-paths plain.txt": "--ca-cert-paths, or --client-cert-path with --client-key-path: a file has no"
    " certificate in PEM form",
    "--client-cert-path plain.txt": "--ca-cert-paths, or --client-cert-path with --client-key-path: a file has no"
    " certificate, or no key, in PEM form",
    "--plugin engine --engine-script no.json": "--engine-script: cannot read the script no.json: No such file",
    "--plugin engine --engine-script junk.conf": "--engine-script: junk.conf:1: not JSON:",
    "--tls-cert-path no.pem --tls-key-path no.pem": "--tls-cert-path: no such file: no.pem",
    "--plugin radix_cache --hf-checkpoint /nowhere": "--hf-checkpoint /nowhere: no such directory;"
    " wanted a directory with"
    " tokenizer files, or the name of a model on the Hugging Face Hub",
    "--plugin radix_cache --hf-checkpoint my/own/model": "--hf-checkpoint my/own/model: no such"
    " directory; wanted a",
    "--plugin radix_cache --hf-checkpoint plain.txt": "--hf-checkpoint plain.txt: not a directory;"
    " wanted a directory",
    "--plugin radix_cache --hf-checkpoint empty": "--hf-checkpoint empty: no tokenizer files in this directory;"
    " wanted tokenizer.json (or tokenizer.model, or vocab.json and merges.txt) and tokenizer_config.json",
    # URLs
    "--worker-urls 10.0.0.1:1": f"{WORKER_URL} got '10.0.0.1:1'; did you mean http://10.0.0.1:1?",
    "--worker-urls http://a:1,http://b:2": f"{WORKER_URL} got 'http://a:1,http://b:2'; put spaces between"
    " several URLs, or write [URL, URL] in a file or a variable",
    "--worker-urls http://a:1;http://b:2": f"{WORKER_URL} got 'http://a:1;http://b:2'; put spaces between",
    "--worker-urls localhost:30001": f"{WORKER_URL} got 'localhost:30001'; did you mean http://localhost:30001?",
    "--worker-urls http://a:99999": f"{WORKER_URL} got 'http://a:99999'; a port is 1 to 65535",
    "--worker-urls http://": f"{WORKER_URL} got 'http://'",
    "--worker-urls http://a:1/generate": f"{WORKER_URL} got 'http://a:1/generate'; did you mean http://a:1?",
    "--worker-urls http://a:1,": f"{WORKER_URL} got 'http://a:1,'; did you mean http://a:1?",
    "--worker-urls http://user:pw@a:1": f"{WORKER_URL} got 'http://user:pw@a:1'",
    "--worker-urls http://0.0.0.0:30001": "--worker-urls: worker http://0.0.0.0:30001 is at 0.0.0.0, an address to"
    " listen on, not to connect to: name an address at which the router reaches the worker",
    "--worker-urls ftp://a:1": "--worker-urls: wanted a worker URL such as http://10.0.0.7:30001,"
    " without a path",
    "--worker-urls http://169.254.169.254": "--worker-urls: worker http://169.254.169.254 is at"
    " 169.254.169.254, a"
    " link-local, multicast, cloud metadata or other reserved address; to allow it, add 169.254.169.254"
    " to --allow-worker",
    "--worker-urls http://192.0.2.1:30000": "--worker-urls: worker http://192.0.2.1:30000 is this"
    " router itself",
    "--pd-disaggregation --prefill http://a:1 xx": "--prefill: wanted URL and a bootstrap port or"
    " none, got 'http://a:1 xx'",
    # commands
    "serve": "unknown command 'serve'; known: demo, engine, plugins, store, top (without a command, the router starts)",
    "engin": "unknown command 'engin': did you mean engine? known: demo, engine, plugins, store, top (without"
    " a command, the router starts)",
    "tpo": "unknown command 'tpo': did you mean top? known: ",
    "hepl": "unknown command 'hepl': did you mean --help? known: ",
    "version": "unknown command 'version': did you mean --version? known: ",
    "http://10.0.0.1:30000": "a worker's URL belongs after a flag: --worker-urls http://10.0.0.1:30000",
    "radix_cache": "radix_cache is a plugin, not a command: --plugin radix_cache",
    "--port 1 demo": "a command comes first: slime-router demo ...",
    "\N{EN DASH}\N{EN DASH}port 7": "a flag begins with two hyphens, and not with the dash '\N{EN DASH}': --port",
    "top http://127.0.0.1:30000": "an address belongs after a flag: --url http://127.0.0.1:30000",
    "top --url 127.0.0.1:30000": "--url: wanted an address such as http://127.0.0.1:30000, got '127.0.0.1:30000'",
    "engine --port 99999": "--port: wanted 0 to 65535, got 99999",
    "engine --host http://a": f"{HOST} got 'http://a'",
    "plugins --all": "plugins takes no flags, got '--all'",
    "engine --prot 3": "unknown flag --prot: did you mean --port? (slime-router engine --help shows"
    " all flags)",
    "engine --plugin radix_cache": "--plugin is a flag of the router, which starts without a command: slime-router"
    " --plugin ...",
    "engine --port many": "--port: wanted a whole number, got 'many'",
    "engine --model /nowhere": "--model and backend transformers go together: give both, or none;"
    " got backend ngram",
    "demo --sampels 1": "unknown flag --sampels: did you mean --samples? (slime-router demo --help"
    " shows all flags)",
    "demo --samples 0": "--samples: wanted 1 or more, got 0",
    # the environment
    "SLIME_ROUTER_PROT=7": "unknown variable SLIME_ROUTER_PROT: did you mean SLIME_ROUTER_PORT?",
    "SLIME_ROUTER_VERBOSE=1": "unknown variable SLIME_ROUTER_VERBOSE: did you mean SLIME_ROUTER_LOG_LEVEL=debug?",
    "SLIME_ROUTER_APIKEY=k": "unknown variable SLIME_ROUTER_APIKEY: did you mean SLIME_ROUTER_API_KEY?",
    "SLIME_ROUTER_PLUGINS=r3": "unknown variable SLIME_ROUTER_PLUGINS: did you mean SLIME_ROUTER_PLUGIN?",
    "slime_router_port=7": "slime_router_port is not read: set SLIME_ROUTER_PORT",
    "SLIME_ROUTER_CONFIG=bad.conf": "SLIME_ROUTER_CONFIG is not read: give --config on the command line",
    "SLIME_ROUTER_CA_CERT_PATH=ca.pem": "SLIME_ROUTER_CA_CERT_PATH is not read: set"
    " SLIME_ROUTER_CA_CERT_PATHS",
    "SLIME_ROUTER_HF_CHECKPOINT=/x": "SLIME_ROUTER_HF_CHECKPOINT belongs to the plugin radix_cache,"
    " which is not loaded:"
    " add --plugin radix_cache",
    "SLIME_ROUTER_PLUGIN=r3,openai": "no plugin 'r3,openai': give one name each, --plugin r3"
    " --plugin openai, or [r3,"
    " openai] in a file or a variable",
    "SLIME_ROUTER_PORT=many": "--port: wanted a whole number, got 'many' (SLIME_ROUTER_PORT)",
    "SLIME_ROUTER_PORT=tcp://10.96.0.1:80": "--port: wanted a whole number, got 'tcp://10.96.0.1:80'"
    " (SLIME_ROUTER_PORT;"
    " Kubernetes sets it for a service of this name: rename the service, or give --port)",
    "SLIME_ROUTER_DISABLE_HEALTH_CHECK=maybe": "Unexpected value for"
    " SLIME_ROUTER_DISABLE_HEALTH_CHECK: 'maybe'. Expecting"
    " 'true', 'false',",
    "SLIME_ROUTER_WORKER_URLS=http://a:1,http://b:2": f"{WORKER_URL} got 'http://a:1,http://b:2'; put spaces"
    " between several URLs, or write [URL, URL] in a file or a variable (SLIME_ROUTER_WORKER_URLS)",
    "SLIME_ROUTER_API_KEY=": "--api-key: wanted a key of visible ASCII characters, without spaces"
    " (SLIME_ROUTER_API_KEY)",
}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in FILES.items():
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLIME_ROUTER_")]:
        monkeypatch.delenv(name)


def test_there_are_many() -> None:
    assert len(MISTAKES) >= 135


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_told_in_one_line_with_its_cure(
    mistake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = mistake.split()
    variable, equals, value = words[0].partition("=")
    if equals and not variable.startswith("-"):
        monkeypatch.setenv(variable, value)
        words = words[1:]
    # RFC 5737: should it start after all, it cannot listen, and ends
    start = not words or words[0].startswith("-")
    assert main(["--host", "192.0.2.1", *words] if start else words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    command, _, line = err.partition(": ")
    assert command == ("slime-router engine" if words[:1] == ["engine"] else "slime-router")
    assert line.startswith(MISTAKES[mistake])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--selector app=x", "--selector has no effect: it is for --service-discovery"),
        ("--otlp-traces-endpoint a:1", "--otlp-traces-endpoint has no effect: it is for --enable-trace"),
        ("--prefill http://a:1", "--prefill has no effect: it is for --pd-disaggregation"),
        (
            "--rate-limit-tokens-per-second 5",
            "--rate-limit-tokens-per-second has no effect: it is for --max-",
        ),
        ("--log-retention-days 3", "--log-retention-days has no effect without --log-dir"),
        ("--api-key k --admin-api-key k", "--admin-api-key is the same key as --api-key: every client"),
    ],
)
def test_flags_without_effect_and_equal_keys_are_told(
    flags: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["--host", "192.0.2.1", *flags.split()]) == 2
    assert [each for each in caplog.messages if each.startswith(line)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLIME_ROUTER_SERVICE_HOST", "10.0.0.1"),
        ("SLIME_ROUTER_SERVICE_PORT", "80"),
        ("SLIME_ROUTER_SERVICE_PORT_HTTP", "80"),
        ("SLIME_ROUTER_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("SLIME_ROUTER_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("SLIME_ROUTER_ENGINE_PORT", "tcp://10.0.0.1:80"),  # of a service named slime-router-engine
        ("SLIME_ROUTER_VERSION", "0.1.0"),  # of an image
        ("slime_router_home", "/srv"),
        ("SLIME_ROUTER_COMPILE", "1"),
    ],
)
def test_variables_of_other_things_are_allowed(
    name: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["--host", "192.0.2.1"]) == 2
    assert "slime-router: cannot listen on 192.0.2.1:30000: " in capsys.readouterr().err
