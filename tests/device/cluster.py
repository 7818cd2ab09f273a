#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Chats with clusters whose workers stand on GPUs, and compares them with one on the CPU.

    tests/device/cluster.py [--bin FOLDER] [--logs FOLDER] [--words N] [LAYOUT ...]

A layout is who runs where (LAYOUTS below). Each gets a router, a prefill and a decode worker on
ports of its own, conversations whose answers are known, tool calls, and prompts of random ids, one
after another and all at once. Prints a few lines per layout, and how much of it is, token for
token, what the first layout said. Exit 0 only when

  - every answer whose words are known is right;
  - in `trusted`, whose kernels have the bits of the CPU, all is what the first layout said;
  - with `batch_invariant`, replies do not depend on whether they run alone.
"""
import argparse
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "tests/golden/tiny-recall"
START_LIMIT_S = 40
ASK_LIMIT_S = 60

# Layout: settings of the prefill worker, of the decode worker, and of both.
LAYOUTS = {
    "cpu": ("device=cpu", "device=cpu", ""),
    "gpu": ("device=cuda:0", "device=cuda:1", ""),
    "one": ("device=cuda:0", "device=cuda:0", ""),
    "invariant": ("device=cuda:0", "device=cuda:1", "batch_invariant=true"),
    "tp": ("device=cuda:0", "device=cuda:0 tp=2", ""),
    "ranks": ("device=cuda:0 tp=2", "device=cuda:0 tp=2", "batch_invariant=true"),
    "trusted": ("device=cuda:0 no-patches", "device=cuda:1 no-patches", ""),
    "mixed": ("device=cpu", "device=cuda:0", "batch_invariant=true"),
}


def program(folder, name):
    for path in sorted(pathlib.Path(folder).rglob(name)):
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    sys.exit(f"no program {name} below {folder}")


def num_gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20,
                                check=False).stdout
    except OSError:  # Emulated, or none.
        return 1
    return max(1, len(re.findall(r"^GPU \d", listed, re.M)))


def cases(words):
    """One conversation of every kind and length up to `words`, and some that call tools."""
    chosen = {}
    for case in json.loads((CHECKPOINT / "recall-cases.json").read_text()):
        length = max(case.get("words", 0), 10 * case.get("gap_sentences", 0))
        if length <= words:
            chosen.setdefault((case["kind"], length), case)
    calls = [c for c in json.loads((CHECKPOINT / "agent-cases.json").read_text())
             if len(json.dumps(c["messages"])) <= 7 * words + 1000 and "tool_calls" in c["expect"]]
    return list(chosen.values()) + calls[:1 + words // 300]


def prompts(words):
    draw = random.Random(5)
    return [[draw.randrange(16, 1900) for _ in range(size)]
            for size in (3, 40, 127, 128, 300, 777, 1500) if size <= max(words, 40)]


class Cluster:
    """Three processes; `close` ends them."""

    def __init__(self, args, name, port):
        self.bin, self.name, self.port = args.bin, name, port
        self.logs = pathlib.Path(args.logs) / name
        self.logs.mkdir(parents=True, exist_ok=True)
        self.router = f"127.0.0.1:{port}"
        self.processes = {}

    def start(self):
        prefill, decode, both = LAYOUTS[self.name]
        own = {"prefill": prefill, "decode": decode}
        self.launch("router", self.port, ["max_active_requests=32"])
        for i, role in enumerate(("prefill", "decode")):
            sets = [f"routers=[\"{self.router}\"]", "cache_tokens=65536", "max_sequences=16",
                    "liveness_timeout=30s", f"metrics_listen=127.0.0.1:{self.port + 4 + i}"]
            self.launch(role, self.port + 1 + i,
                        sets + [s for s in (own[role] + " " + both).split(" ") if s])
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit and all(p.poll() is None for p in self.processes.values()):
            done = subprocess.run([self.tool("isthmusctl"), "--server", self.router, "--json",
                                   "status"], capture_output=True, text=True, timeout=10,
                                  check=False)
            if re.search(r'"is_ready":\s*true', done.stdout):
                return True
            time.sleep(0.1)
        return False

    def tool(self, name):
        return program(self.bin, name)

    def launch(self, role, port, sets):
        command = [self.tool(f"isthmus-{role}"), "--config",
                   str(ROOT / f"deploy/examples/{role}.json")]
        if "no-patches" in sets:
            sets = [s for s in sets if s != "no-patches"]
            listed = subprocess.run([self.tool("isthmus-diag"), "patches"], capture_output=True,
                                    text=True, timeout=20, check=False).stdout
            sets += [f"patches.{n}=false" for n in re.findall(r"^(\S+) \(o[nf]+\)$", listed, re.M)]
        for one in [f"listen=127.0.0.1:{port}", f"checkpoint={CHECKPOINT}"] + sets:
            command += ["--set", one]
        log = open(self.logs / f"{role}.log", "wb")
        self.processes[role] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT,
                                                cwd=ROOT, start_new_session=True)

    def recall(self, file, limit):
        out = self.logs / "recall.json"
        with open(self.logs / "recall.log", "wb") as log:
            subprocess.run([self.tool("isthmus-diag"), "recall", "--server", self.router, "--cases",
                            str(file), "--json", str(out)], stdout=log, stderr=log, timeout=limit,
                           check=False)
        return json.loads(out.read_text()) if out.exists() else []

    def generate(self, files, extra):
        """The replies to prompts that run at the same time."""
        runs = [subprocess.Popen([self.tool("isthmusctl"), "--server", self.router, "--json",
                                  "generate", "--tokens", str(f), "--ignore-end"] + extra,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for f in files]
        replies = []
        for run in runs:
            try:
                out, error = run.communicate(timeout=ASK_LIMIT_S)
            except subprocess.TimeoutExpired:
                run.kill()
                out, error = "", "no reply in time"
            try:
                replies.append(json.loads(out))
            except ValueError:
                replies.append({"tokens": [], "error": error.strip()[-200:]})
        return replies

    def metrics(self, which):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port + 4 + which}/metrics",
                                        timeout=5) as page:
                text = page.read().decode()
        except OSError:
            return {}
        sums = {}
        for name, value in re.findall(r"^(isthmus_\w+)(?:\{[^}]*\})? (\S+)$", text, re.M):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def close(self):
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + 8
        for process in self.processes.values():
            try:
                process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def last_words(self):
        for role in self.processes:
            lines = (self.logs / f"{role}.log").read_text(errors="replace").splitlines()
            bad = [l for l in lines if re.search('"level":"(error|warning)"|check failed', l)]
            for line in bad[-3:]:
                print(f"    {role}: {line[:240]}")


def ask(cluster, case_file, prompt_files, limit):
    answers = {"recall": cluster.recall(case_file, limit)}
    greedy = ["--temperature", "0", "--max-tokens", "24"]
    answers["alone"] = [cluster.generate([f], greedy)[0] for f in prompt_files]
    answers["together"] = cluster.generate(prompt_files, greedy)
    answers["drawn"] = cluster.generate(prompt_files, ["--temperature", "0.8", "--top-p", "0.95",
                                                       "--seed", "7", "--max-tokens", "24"])
    return answers


def num_same(some, others):
    return sum(a["tokens"] == b["tokens"] != [] for a, b in zip(some, others))


def report(name, first, answers, seconds, metrics):
    """Prints what came and returns whether it is right."""
    recall = answers["recall"]
    passed = sum(r["passed"] for r in recall)
    same = sum(a["reply"] == b["reply"] for a, b in zip(recall, first["recall"]))
    is_right = passed == len(recall) == len(first["recall"]) > 0
    is_exact = same == len(recall)
    line = f"{name}: {passed} of {len(recall)} answers right; as the first's: {same} answers"
    for kind in ("alone", "together", "drawn"):
        same = num_same(answers[kind], first[kind])
        line += f", {kind} {same}/{len(first[kind])}"
        is_exact = is_exact and same == len(first[kind])
        is_right = is_right and all(reply["tokens"] for reply in answers[kind])
    same = num_same(answers["alone"], answers["together"])
    print(f"{line}; alone as together {same}/{len(answers['alone'])}")
    if name == "trusted":
        is_right = is_right and is_exact
    if "batch_invariant=true" in LAYOUTS[name][2]:
        is_right = is_right and same == len(answers["alone"])
    prefill, decode = metrics
    steps = decode.get("isthmus_worker_step_seconds_count", 0)
    print(f"    pushed {prefill.get('isthmus_prefill_pushed_bytes_total', 0) / 1e6:.1f} MB of "
          f"{prefill.get('isthmus_prefill_prompts_total', 0):.0f} prompts; "
          f"{decode.get('isthmus_decode_verified_page_groups_total', 0):.0f} page groups verified; "
          f"{decode.get('isthmus_decode_output_tokens_total', 0):.0f} tokens in {steps:.0f} steps "
          f"of {1e3 * decode.get('isthmus_worker_step_seconds_sum', 0) / max(steps, 1):.2f} ms; "
          f"ready after {seconds[0]:.1f} s, asked {seconds[1]:.1f} s")
    for kind in ("alone", "together", "drawn"):
        for reply in answers[kind]:
            if "error" in reply:
                print(f"    {kind}: {reply['error']}")
    for a, b in zip(recall, first["recall"]):
        if not a["passed"] or a["reply"] != b["reply"]:
            print(f"    {a['id']}: \"{a['reply'][:90]}\", the first said \"{b['reply'][:90]}\"")
    return is_right


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=str(ROOT / "build/device/bin"))
    parser.add_argument("--logs", default=str(ROOT / "build/device/logs"))
    parser.add_argument("--words", type=int, default=3000, help="of the longest conversation")
    parser.add_argument("--port", type=int, default=7400)
    parser.add_argument("--limit", type=int, default=120, help="seconds for a layout's answers")
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=", ".join(LAYOUTS))
    args = parser.parse_args()
    logs = pathlib.Path(args.logs)
    logs.mkdir(parents=True, exist_ok=True)
    case_file = logs / "cases.json"
    case_file.write_text(json.dumps(cases(args.words)))
    prompt_files = []
    for i, prompt in enumerate(prompts(args.words)):
        prompt_files.append(logs / f"prompt{i}")
        prompt_files[-1].write_text(" ".join(map(str, prompt)))
    first, is_right = None, True
    has_two = num_gpus() > 1
    for i, name in enumerate(args.layouts or ["cpu", "trusted", "gpu", "invariant"]):
        prefill, decode, both = LAYOUTS[name]
        if not has_two and "tp=" in prefill + decode:
            print(f"{name}: skipped, it needs two GPUs")
            continue
        if not has_two:  # Then both workers share one.
            LAYOUTS[name] = (prefill, decode.replace("cuda:1", "cuda:0"), both)
        cluster = Cluster(args, name, args.port + 10 * i)
        start = time.monotonic()
        try:
            if not cluster.start():
                print(f"{name}: the cluster did not become ready")
                cluster.last_words()
                is_right = False
                continue
            ready = time.monotonic()
            answers = ask(cluster, case_file, prompt_files, args.limit)
            seconds = (ready - start, time.monotonic() - ready)
            first = first or answers
            if not report(name, first, answers, seconds, (cluster.metrics(0), cluster.metrics(1))):
                is_right = False
                cluster.last_words()
        except subprocess.TimeoutExpired as late:
            print(f"{name}: no answer in time: {' '.join(map(str, late.cmd))[:200]}")
            cluster.last_words()
            is_right = False
        finally:
            cluster.close()
    print("cluster: " + ("ok" if is_right else "FAILED"))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
