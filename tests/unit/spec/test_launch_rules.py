"""Rules of the launch section: each bad spec gives its code at its line with help; each good one gives no finding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _launch_case import launch_job, launch_plan
from _spec_case import FIRST, findings, place, spec_text
from hypothesis import given, settings
from hypothesis import strategies as st
from typer import Exit

from partool.catalog.hardware import resolve_hardware
from partool.cli._load import Output, load_plan_or_exit
from partool.planner.findings.stopping import check_duration
from partool.planner.rules.launching import check_launch, environment, resolve_launch
from partool.planner.stopping import roomy_s
from partool.spec import load_text
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.launch import LaunchSpec, Secret
from partool.spec.targets.k8s.rules import quantity
from partool.spec.targets.k8s.section import K8sSpec
from partool.spec.targets.rules import Forecast
from partool.spec.targets.slurm.rules import time_s
from partool.spec.targets.slurm.section import SlurmSpec

K8S = "launch:\n  target: k8s\n  image: registry.example/train:1\n"
STORED = K8S + "  k8s: {storage: 'pvc:runs'"
SLURM = "launch:\n  target: slurm\n"

BAD: list[tuple[str, str, int, str]] = [
    # secrets with their values
    ("launch:\n  env:\n    WANDB_API_KEY: 0123abc\n", "PT520", 2, "secrets"),
    ("launch:\n  env:\n    HF_TOKEN: hf_x\n", "PT520", 2, "file:"),
    (K8S + "  env:\n    MY_PASSWORD: swordfish\n", "PT520", 4, "secret: NAME, key: KEY"),
    ("launch:\n  env:\n    STORE: https://me:swordfish@example.com/x\n", "PT520", 2, "secrets"),
    ("launch:\n  env:\n    NOTHING_SAID: ghp_0123456789abcdef0123\n", "PT520", 2, "secrets"),
    # secrets that cannot be found
    (STORED + "}\n  secrets:\n    A: {file: /x}\n", "PT521", 5, "secret: NAME, key: KEY"),
    (SLURM + "  secrets:\n    A: {secret: hub, key: token}\n", "PT521", 3, "file:"),
    (SLURM + "  secrets:\n    A: {secret: hub, key: token, file: /x}\n", "PT521", 3, "file:"),
    (SLURM + "  secrets:\n    A: {}\n", "PT521", 3, "file:"),
    (STORED + "}\n  secrets:\n    A: {secret: hub}\n", "PT521", 5, "key: KEY"),
    (STORED + "}\n  secrets:\n    A: {key: token}\n", "PT521", 5, "secret: NAME"),
    # the environment
    ("launch:\n  env:\n    RANK: '0'\n", "PT222", 2, "hardware.nodes"),
    ("launch:\n  env:\n    NODE_RANK: '0'\n", "PT222", 2, "hardware.nodes"),
    ("launch:\n  env:\n    PET_NNODES: '2'\n", "PT222", 2, "drop it"),
    ("launch:\n  env:\n    PARTOOL_ANY: '2'\n", "PT222", 2, "drop it"),
    ("launch:\n  secrets:\n    MASTER_ADDR: {file: /x}\n", "PT222", 2, "drop it"),
    ("launch:\n  env:\n    A-B: x\n", "PT221", 2, "underscores"),
    ("launch:\n  secrets:\n    A B: {file: /x}\n", "PT221", 2, "underscores"),
    ("launch:\n  env:\n    A: x\n  secrets:\n    A: {file: /x}\n", "PT522", 2, "one of the two"),
    ("launch:\n  env:\n    HIP_VISIBLE_DEVICES: '0'\n    ROCR_VISIBLE_DEVICES: '0'\n", "PT522", 3, "keep HIP"),
    ("launch:\n  env:\n    HSA_OVERRIDE_GFX_VERSION: 10.3.0\n", "PT522", 2, "consumer"),
    # images and containers
    ("launch:\n  target: k8s\n", "PT523", 0, "deploy/"),
    ("launch:\n  target: k8s\n  image: /images/train.sif\n", "PT523", 2, "REGISTRY/NAME:TAG"),
    (SLURM + "  slurm:\n    container: pyxis\n", "PT523", 3, "image:"),
    (SLURM + "  image: registry.example/train:1\n", "PT523", 2, "container to pyxis or apptainer"),
    ("launch:\n  image: registry.example/train:1\n", "PT523", 1, "drop it"),
    ("launch:\n  target: torchrun\n  image: registry.example/train:1\n", "PT523", 2, "drop it"),
    # options that the target does not support
    ("launch:\n  target: torchrun\n  min_nodes: 1\n", "PT524", 2, "slurm"),
    (STORED + "}\n  min_nodes: 1\n", "PT524", 4, "slurm"),
    (SLURM + "  min_nodes: 3\n", "PT524", 2, "or drop it"),
    # options of sbatch
    (SLURM + "  slurm:\n    options:\n      gres: gpu:8\n", "PT525", 4, "launch.slurm.gpus"),
    (SLURM + "  slurm:\n    options:\n      mem-per-gpu: 10G\n", "PT525", 4, "launch.slurm.memory"),
    (SLURM + "  slurm:\n    options:\n      signal: USR1@60\n", "PT525", 4, "signal_lead_s"),
    (SLURM + "  slurm:\n    options:\n      gpus-per-task: '1'\n", "PT525", 4, "hides devices"),
    (SLURM + "  slurm:\n    options:\n      container-image: x\n", "PT525", 4, "container: pyxis"),
    (SLURM + "  slurm:\n    options:\n      output: x.out\n", "PT525", 4, "partool logs"),
    (SLURM + "  slurm:\n    options:\n      outp: x.out\n", "PT525", 4, "partool logs"),  # as getopt_long reads it
    (SLURM + "  slurm:\n    options:\n      nod: '7'\n", "PT525", 4, "launch.slurm.nodelist"),
    (SLURM + "  slurm:\n    options:\n      hold: false\n", "PT102", 4, "leave the option out"),
    (SLURM + "  slurm:\n    options:\n      requeue: ''\n", "PT525", 4, "launch.requeues"),
    (SLURM + "  slurm:\n    options:\n      array: 0-3\n", "PT525", 4, "--array"),
    # mounts
    (SLURM + "  mounts:\n    - {source: /data, target: /data}\n", "PT526", 3, "slurm or k8s"),
    (STORED + "}\n  mounts:\n    - {source: /a, target: /data}\n    - {source: /b, target: /data/}\n", "PT526", 6, ""),
    (STORED + "}\n  mounts:\n    - {source: /a, target: /partool/runs}\n", "PT526", 5, "launch.k8s.storage"),
    (STORED + "}\n  mounts:\n    - {source: /a, target: /dev/shm}\n", "PT526", 5, "launch.k8s.shared_memory"),
    (STORED + "}\n  mounts:\n    - {source: /a, target: /etc}\n", "PT526", 5, "another folder"),
    (STORED + "}\n  mounts:\n    - {source: /a, target: /}\n", "PT526", 5, "another folder"),
    (STORED + "}\n  mounts:\n    - {source: /a, target: //}\n", "PT526", 5, "another folder"),
    (STORED + "}\n  mounts:\n    - {source: /a, target: //dev/shm}\n", "PT526", 5, "another folder"),
    (
        SLURM + "  image: x/y:1\n  slurm: {container: pyxis}\n  mounts:\n    - {source: 'pvc:a', target: /a}\n",
        "PT526", 5, "folder of the nodes",
    ),
    # times
    (SLURM + "  slurm:\n    signal_lead_s: 60\n", "PT527", 3, "150 or more"),
    (SLURM + "  slurm:\n    signal_lead_s: 0\n", "PT527", 3, "150 or more"),
    (SLURM + "  shutdown_timeout_s: 65500\n", "PT527", 2, "at most 65445"),
    (SLURM + "  slurm:\n    time: 2\n", "PT527", 3, "more than 150 s"),
    # pods
    (K8S + "  k8s:\n    storage: pvc:runs\n    memory: 8Gi\n    shared_memory: 8Gi\n", "PT528", 6, "memory"),
    (K8S + "  k8s:\n    storage: pvc:runs\n    shared_memory: 64Mi\n", "PT528", 5, "8Gi or more"),
    (K8S + "  k8s:\n    storage: pvc:runs\n    user: 0\n", "PT528", 5, "1000"),
    (K8S + "  k8s:\n    user: 1\n", "PT528", 3, "pvc:CLAIM"),
    (K8S + "  k8s:\n    storage: pvc:runs\n    topology: {level: example.com/rack}\n", "PT528", 5, "queue: NAME"),
    (K8S + "  k8s:\n    storage: pvc:runs\n    runtime: mine\n", "PT528", 5, "kind: trainjob"),
    (K8S + "  k8s:\n    storage: pvc:runs\n    labels: {partool.dev/run: x}\n", "PT528", 5, "drop it"),
    (STORED + ", host_network: true,\n    network_policy: true}\n", "PT528", 4, "drop one of the two"),
    # paths
    ("launch:\n  python: venv/bin/python\n", "PT529", 1, "absolute"),
    (SLURM + "  slurm:\n    setup: ~ann/modules.sh\n", "PT529", 3, "absolute"),
    (K8S + "  python: ~/venv/bin/python\n  k8s: {storage: 'pvc:runs'}\n", "PT529", 3, "absolute"),
    (
        SLURM + "  image: x/y:1\n  slurm: {container: pyxis}\n  secrets:\n    A: {file: token}\n",
        "PT529", 5, "launch.mounts",
    ),
    (SLURM + "  slurm:\n    profile: no-such.yaml\n", "PT529", 3, "one a line"),
    # forms
    (SLURM + "  slurm:\n    partition: 'gpu; rm'\n", "PT106", 3, "letters, digits"),
    (SLURM + "  slurm:\n    account: \"a\\n#SBATCH --wrap=x\"\n", "PT106", 3, "letters, digits"),
    (SLURM + "  slurm:\n    options: {Nodes: '2'}\n", "PT106", 3, "long name"),
    (SLURM + "  slurm:\n    time: 1 hour\n", "PT106", 3, "HH:MM:SS"),
    (K8S + "  k8s:\n    memory: 64 GB\n", "PT106", 4, "64Gi"),
    (K8S + "  k8s:\n    storage: runs\n", "PT106", 4, "pvc:CLAIM"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "code", "line", "help"), BAD, ids=lambda value: str(value)[-40:])
def test_bad_sections(section: str, code: str, line: int, help: str) -> None:
    found = findings(spec_text(section))
    assert [place(finding) for finding in found] == [(code, FIRST + line)]
    assert help in found[0].help
    assert "swordfish" not in str(found)


GOOD = [
    "launch: {env: {TOKENIZERS_PARALLELISM: 'false', PAD_TOKEN: '</s>', HF_HUB_DISABLE_IMPLICIT_TOKEN: '1'}}\n",
    "launch: {env: {GOOGLE_APPLICATION_CREDENTIALS: /keys/a.json, HF_TOKEN_PATH: x, HIP_VISIBLE_DEVICES: '0,1'}}\n",
    "launch: {env: {EMPTY: '', LINES: \"a\\nb\", URL: 'https://example.com:8080/a@b'}}\n",
    "launch: {secrets: {HF_TOKEN: {file: tokens/hf}}, python: python3}\n",
    "launch: {slurm: {partition: gpu, container: pyxis}, k8s: {kind: volcano, queue: train}}\n",
    STORED + ", memory: 64Gi, shared_memory: 16Gi, cpu: 8}\n  secrets: {HF_TOKEN: {secret: hub, key: token}}\n"
    "  mounts: [{source: /data, target: /data}, {source: 'pvc:more', target: /more, read_only: true}]\n",
    STORED + ", queue: train, topology: {level: example.com/rack}}\n",
    STORED + ", kind: trainjob, runtime: mine, labels: {team: a}}\n",
    SLURM + "  min_nodes: 1\n  slurm: {time: '2-00:00:00', signal_lead_s: 300, gpus: gres, gpu_type: h100}\n",
    SLURM + "  slurm: {options: {mail-type: END, licenses: 'scratch:1', contiguous: ''}, memory: 512}\n",
    SLURM + "  image: /images/train.sif\n  slurm: {container: apptainer}\n  mounts: [{source: /d, target: /partool}]\n",
    SLURM + "  image: nvcr.io#nvidia/pytorch:26.10-py3\n  slurm: {container: pyxis}\n",
]


@pytest.mark.parametrize("section", GOOD)
def test_good_sections(section: str) -> None:
    assert findings(spec_text(section)) == []


def test_a_machine_without_a_launch_section_may_have_any_number_of_nodes() -> None:
    assert findings(spec_text("", nodes=4)) == []
    assert findings(spec_text("launch: {restarts: 3}\ncheckpoint: {every: 5}\n", nodes=4)) == []


@pytest.mark.parametrize(
    ("section", "line", "help"),
    [
        ("launch:\n  target: local\n", 1, "slurm or k8s"),
        ("launch:\n  target: torchrun\n  restarts: 2\n", 2, "restarts: 0"),
        (SLURM + "  min_nodes: 5\n", 2, "3 or fewer"),
    ],
)
def test_several_nodes(section: str, line: int, help: str) -> None:
    found = findings(spec_text(section, nodes=4))
    assert [place(finding) for finding in found] == [("PT524", FIRST + line)]
    assert help in found[0].help
    assert findings(spec_text(section.replace("local", "torchrun").replace("5", "4").replace("2", "0"), nodes=4)) == []


def machines(accelerator: str = "h100-sxm", nodes: int = 1, **fields: object) -> Devices:
    spec = HardwareSpec.model_validate({"accelerator": accelerator, "nodes": nodes, **fields})
    devices = resolve_hardware(spec, "bf16").devices
    assert devices is not None
    return devices


def test_a_plan_for_another_target_is_checked_by_all_rules() -> None:
    """The check that ``launch plan.json --target T`` makes."""
    launch = LaunchSpec(secrets={"A": Secret(file="/x")}, restarts=1)
    assert check_launch(launch, machines()) == []
    there = launch.model_copy(update={"target": "k8s"})
    found = check_launch(there, machines())
    assert sorted({finding.code for finding in found}) == ["PT521", "PT523", "PT528"]
    assert all(finding.help for finding in found)
    assert [finding.code for finding in check_launch(launch, machines(nodes=2))] == ["PT524"]
    assert check_launch(launch, machines(nodes=2), planning=True) == []


def test_corruption_on_gh200_with_slingshot_is_warned_of_until_it_is_settled() -> None:
    devices = machines("gh200-96", nodes=2, fabric="slingshot")
    quiet = LaunchSpec(target="slurm")
    found = check_launch(quiet, devices)
    assert [(finding.code, finding.severity) for finding in found] == [("PT522", "warning")]
    assert "network: auto" in found[0].help
    for settled in ({"network": "auto"}, {"network": "slingshot"}, {"env": {"NCCL_LL128_C2C": "0"}}):
        assert check_launch(LaunchSpec.model_validate({"target": "slurm", **settled}), devices) == []
    assert check_launch(quiet, machines("gh200-96", nodes=1, fabric="slingshot")) == []
    assert check_launch(quiet, machines("mi250x", nodes=2, fabric="slingshot")) == []


def test_a_network_preset_for_ranks_on_a_cpu_is_warned_of() -> None:
    found = check_launch(LaunchSpec(target="slurm", network="ib"), machines("cpu", nodes=2, per_node=2))
    assert [(finding.code, finding.severity) for finding in found] == [("PT522", "warning")]
    assert check_launch(LaunchSpec(target="slurm", network="auto"), machines("cpu", nodes=2, per_node=2)) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60", 3600),
        ("1:30", 90),
        ("1:30:00", 5400),
        ("2-0", 172800),
        ("1-2:30", 95400),
        ("1-02:03:04", 93784),
        ("0", 0),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, seconds: int) -> None:
    assert time_s(text) == seconds


@given(st.from_regex(r"\A(\d{1,3}-\d{1,2}(:\d{1,2}){0,2}|\d{1,4}(:\d{1,2}){0,2})\Z"))
def test_any_time_limit_that_is_accepted_is_understood(text: str) -> None:
    assert time_s(str(SlurmSpec(time=text).time)) >= 0


@given(st.from_regex(r"\A[0-9]{1,4}(\.[0-9])?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?\Z"))
def test_any_quantity_that_is_accepted_is_understood(text: str) -> None:
    assert quantity(str(K8sSpec(memory=text).memory)) >= 0.0
    assert quantity("2Gi") == 2**31
    assert quantity("1500m") == 1.5


def expected(total_s: float, stop_s: int = 1, *, saves: bool = False) -> Forecast:
    return Forecast(total_s, stop_s, roomy_s(stop_s), "a step 1 s", saves=saves, loss="up to 7 steps")


def test_what_time_limits_mean_for_the_training() -> None:
    def found(total_s: float, **section: object) -> list[tuple[str, str]]:
        launch = LaunchSpec.model_validate({"target": "slurm", **section})
        return [(finding.severity, finding.message) for finding in check_duration(launch, expected(total_s))]

    hour = {"slurm": {"time": "1:00:00", "partition": "gpu"}}  # 3450 s without the signal lead of 150 s
    assert found(3400, **hour) == []
    [(severity, message)] = found(3500, **hour)
    assert severity == "note"
    assert "requeued once" in message
    [(severity, message)] = found(10 * 3450, **hour, requeues=8)
    assert severity == "warning"
    assert "requeued 9 times" in message
    assert [severity for severity, _ in found(1e9)] == ["warning"] * 2  # neither a time limit nor a partition
    assert "no time limit" in found(60, slurm={"partition": "gpu"})[0][1]
    [(severity, message)] = found(60, slurm={"time": "1:00:00"})
    assert (severity, message.startswith("no partition is named")) == ("warning", True)
    assert found(60, slurm={"time": "1:00:00", "qos": "long"}) == []
    helps = [check_duration(LaunchSpec(target="slurm"), expected(total_s))[0].help for total_s in (60.0, 72000.0, 1e9)]
    assert [re.findall(r"'.*?'", help) for help in helps] == [["'01:00:00'"], ["'1-01:00:00'"], ["'2-00:00:00'"]]
    assert found(1e9, target="local", **hour) == []
    pods = {"target": "k8s", "k8s": {"deadline_s": 3600}}
    assert found(3500, **pods) == []
    assert found(3700, **pods)[0][0] == "warning"


def site(folder: Path, text: str) -> list[tuple[str, str, int]]:
    (folder / "site.yaml").write_text(text, encoding="utf-8")
    found = findings(spec_text(SLURM + "  slurm:\n    profile: site.yaml\n"), folder)
    assert all(finding.span for finding in found)
    return [(f.code, Path(f.span.file).name, f.span.line) for f in found if f.span]


def test_a_mistake_in_a_site_profile_is_shown_there(tmp_path: Path) -> None:
    assert site(tmp_path, "partition: gpu\naccount: a\n") == []
    assert site(tmp_path, "account: a\npartion: gpu\nqos: [1]\n") == [
        ("PT101", "site.yaml", 2),
        ("PT102", "site.yaml", 3),
    ]
    assert "`partition`" in findings(spec_text(SLURM + "  slurm: {profile: site.yaml}\n"), tmp_path)[0].help
    assert site(tmp_path, "account: a\nprofile: other.yaml\n") == [("PT529", "site.yaml", 2)]
    assert site(tmp_path, "account: a\naccount: b\n") == [("PT008", "site.yaml", 2)]
    assert site(tmp_path, "- a\n") == [("PT007", "site.yaml", 1)]
    assert site(tmp_path, "") == [("PT005", "site.yaml", 1)]
    assert site(tmp_path, "a: [\n")[0][:2] == ("PT006", "site.yaml")
    assert site(tmp_path, "account: a\noptions: {gres: 'gpu:1'}\n") == [("PT525", "site.yaml", 2)]
    own = SLURM + "  slurm:\n    profile: site.yaml\n    options: {gres: 'gpu:2'}\n"
    assert [place(finding) for finding in findings(spec_text(own), tmp_path)] == [("PT525", 9)]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("launch.secrets.HF_TOKEN.file=/x", {"secrets": {"HF_TOKEN": {"file": "/x"}}}),
        ("launch.slurm.options.mail-type=END", {"slurm": {"options": {"mail-type": "END"}}}),
        ("launch.k8s.labels.team=a", {"k8s": {"labels": {"team": "a"}}}),
        ("launch.slurm.time=90", {"slurm": {"time": "90"}}),
        ("launch.slurm.options.nice=100", {"slurm": {"options": {"nice": "100"}}}),
        ("launch.slurm.options.power=0.5", {"slurm": {"options": {"power": "0.5"}}}),
        ("launch.slurm.options.hold=true", {"slurm": {"options": {"hold": ""}}}),
        ("launch.env.A='1'", {"env": {"A": "1"}}),
    ],
)
def test_overrides_reach_keys_that_the_user_names(override: str, value: dict[str, object]) -> None:
    loaded = load_text(spec_text(""), overrides=[override])
    assert loaded.diagnostics == []
    assert loaded.spec is not None
    assert loaded.spec.model_dump(mode="json", exclude_defaults=True)["launch"] == value


@pytest.mark.parametrize("override", ["launch.env.A.b=1", "launch.secrets.A.flie=/x", "launch.slurm.options.a.b=1"])
def test_overrides_of_what_is_not_there_are_refused(override: str) -> None:
    found = load_text(spec_text(""), overrides=[override]).diagnostics
    assert {finding.code for finding in found} <= {"PT101", "PT102"}
    assert found


def test_no_option_that_partool_writes_can_be_given_again() -> None:
    from partool.render.slurm import render

    section = {
        "partition": "a", "account": "a", "qos": "a", "reservation": "a", "constraint": "a", "nodelist": "a",
        "exclude": "a", "time": "60", "cpus_per_task": 4, "memory": "1G",
    }  # fmt: skip
    written = set()
    for gpus in ("gpus-per-node", "gres"):
        plan = launch_plan(slurm={**section, "gpus": gpus})
        job = launch_job(plan, tasks=(plan, plan))
        header = [line for line in render(job).text.splitlines() if line.startswith("#SBATCH --")]
        written |= {line.removeprefix("#SBATCH --").partition("=")[0] for line in header}
    assert {"nodes", "gres", "gpus-per-node", "signal", "requeue", "array"} <= written
    for name in written:
        spec = LaunchSpec.model_validate({"target": "slurm", "slurm": {"options": {name: ""}}})
        assert [finding.code for finding in check_launch(spec, machines())] == ["PT525"], name


NAMES = st.sampled_from(["A", "RANK", "HF_TOKEN", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_PROTO"])
PATHS = st.sampled_from(["/a", "a", "~/a", "~b/a", "a.sif", "/a/../b.sqsh"])
SECRETS = st.fixed_dictionaries(
    {}, optional={"file": PATHS, "secret": st.just("hub"), "key": st.just("token")}
)  # fmt: skip
MOUNTS = st.fixed_dictionaries(
    {
        "source": st.sampled_from(["/a", "/", "pvc:a"]),
        "target": st.sampled_from(["/a", "/a/", "/", "//", "/partool/..", "/etc", "/dev/shm/x"]),
    }
)
SLURMS = st.fixed_dictionaries(
    {},
    optional={
        "container": st.sampled_from(["none", "pyxis", "apptainer"]),
        "time": st.sampled_from(["0", "1", "1:0", "9" * 30, "1-0", "99999-99:99:99"]),
        "signal_lead_s": st.sampled_from([0, 1, 65535]),
        "setup": PATHS,
        "options": st.dictionaries(st.sampled_from(["gres", "licenses", "container-x", "mem"]), st.just("1")),
    },
)
PODS = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["jobset", "job", "pytorchjob", "trainjob", "volcano"]),
        "memory": st.sampled_from(["0", "1m", "9" * 32, "1.5Gi"]),
        "shared_memory": st.sampled_from(["0", "1m", "64Gi"]),
        "storage": st.just("pvc:a"),
        "user": st.sampled_from([0, 1]),
        "queue": st.just("a"),
        "topology": st.just({"level": "a"}),
        "labels": st.dictionaries(st.sampled_from(["partool/a", "a", "kueue.x-k8s.io/queue-name"]), st.just("")),
        "deadline_s": st.just(1),
        "runtime": st.just("a"),
    },
)
SECTIONS = st.fixed_dictionaries(
    {"target": st.sampled_from(["local", "torchrun", "slurm", "k8s"])},
    optional={
        "image": st.sampled_from(["a", "a.sif", "/a.sif", "a/b:1@sha256:0"]),
        "env": st.dictionaries(NAMES, st.sampled_from(["", "0", "x", "sk-0123456789abcdef", "a://b:c@d"])),
        "secrets": st.dictionaries(NAMES, SECRETS),
        "mounts": st.lists(MOUNTS, max_size=3),
        "network": st.sampled_from(["auto", "none", "ib", "slingshot"]),
        "min_nodes": st.sampled_from([1, 2, 3]),
        "restarts": st.sampled_from([0, 1]),
        "requeues": st.sampled_from([0, 5]),
        "shutdown_timeout_s": st.sampled_from(["auto", 1, 60, 10**8]),
        "python": st.one_of(PATHS, st.just("python3")),
        "slurm": SLURMS,
        "k8s": PODS,
    },
)
MACHINES = [("h100-sxm", 1), ("gh200-96", 2), ("mi300x", 3), ("cpu", 1), ("cpu", 2)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SECTIONS, st.sampled_from(MACHINES), st.sampled_from([0.0, 1.0, 1e12]))
def test_any_section_is_checked_without_a_mishap(
    section: dict[str, object], kind: tuple[str, int], total_s: float
) -> None:
    accelerator, nodes = kind
    devices = machines(accelerator, nodes=nodes, fabric="slingshot")
    launch = resolve_launch(LaunchSpec.model_validate(section), Path("/specs")).launch
    found = [*check_launch(launch, devices), *check_duration(launch, expected(total_s, 200))]
    assert all(finding.help and finding.path[0] in ("launch", "hardware") for finding in found)
    assert len(set(found)) == len(found)
    assert "sk-0123456789abcdef" not in str(found)
    variables = environment(launch, devices)
    assert {variable.name for variable in variables}.isdisjoint(launch.secrets)
    assert {**launch.env, **{v.name: v.value for v in variables}} == {v.name: v.value for v in variables} | {
        name: launch.env[name] for name in launch.env if name in launch.secrets
    }
    again = LaunchSpec.model_validate_json(launch.model_dump_json())
    assert again == launch
    assert check_launch(again, devices) == check_launch(launch, devices)


@pytest.mark.parametrize("form", ["text", "json", "github", "sarif"])
def test_a_refused_secret_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: Output) -> None:
    file = tmp_path / "spec.yaml"
    # the second finding shows the line before its own
    file.write_text(spec_text("launch:\n  env: {A: b, HF_TOKEN: hf_swordfish}\n  image: Not An Image\n"))
    with pytest.raises(Exit):
        load_plan_or_exit(file, [], form)
    file.write_text(spec_text("launch:\n  env: {A: b, HF_TOKEN: hf_swordfish}\n  secrets: {B: {}}\n"))
    with pytest.raises(Exit):
        load_plan_or_exit(file, [], form)
    output = capsys.readouterr()
    assert "PT520" in output.out + output.err
    assert "PT521" in output.out + output.err
    assert "swordfish" not in output.out + output.err


def test_fields_without_effect_are_said() -> None:
    def said(devices: Devices, **fields: object) -> list[tuple[str, str]]:
        launch = LaunchSpec.model_validate({"image": "x/y:1", **fields})
        return [(f.severity, f.message) for f in check_launch(launch, devices) if f.code == "PT524"]

    gpu, cpu = machines(), machines("cpu")
    [(severity, message)] = said(gpu, target="k8s", requeues=3)
    assert severity == "note"
    assert "without a limit" in message
    assert said(gpu, target="slurm", requeues=3) == []
    for devices, gpus in ((gpu, "none"), (cpu, "gres")):
        [(severity, message)] = said(devices, target="slurm", slurm={"gpus": gpus, "gpu_type": "h100"})
        assert severity == "warning"
        assert "gpu_type: h100 has no effect" in message
    assert said(gpu, target="slurm", slurm={"gpus": "gres", "gpu_type": "h100"}) == []
