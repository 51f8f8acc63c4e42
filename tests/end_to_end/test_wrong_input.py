"""What a user can get wrong: one sentence that names the setting, exit code 2, no traceback, nothing left behind.

Every command that a user could type, whatever part of the program answers; rules of single settings are tested beside
them (tests/config/test_schema.py).
"""

from __future__ import annotations

import functools
import http.server
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner import cli
from runner.config.compose import known_keys
from runner.track.card import TrackingRecord
from tests.recipes.writers import save_llama, save_t5
from tests.tiny_models import save_bert
from tests.tools.compare.make import PUBLISHED
from tests.tools.sweep.folders import sweep_in

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "runner": lambda arguments: cli.main(arguments, time.time()),
    "runner.plan": functools.partial(cli.run_tool, "plan"),
    "runner.verify": functools.partial(cli.run_tool, "verify"),
    "runner.compare": functools.partial(cli.run_tool, "compare"),
    "runner.track": functools.partial(cli.run_tool, "track"),
}
MACHINES = "distributed_type: MULTI_CPU\nnum_machines: 2\nnum_processes: 8\n"
FILES: dict[str, bytes | str] = {
    # source, label, mark, sentence
    "good.tsv": "a\t1\t\tHello there\nb\t0\t\tHello not\n" * 4,
    "word.tsv": "a\tyes\t\tHello\n",
    "binary.tsv": b"\xff\xfe\x00\x01",
    "empty.tsv": "",
    "pairs.tsv": "premise\thypothesis\tlabel\nIt ran.\tIt fell.\tneutral\n",
    "unknown.tsv": "premise\thypothesis\tlabel\nIt ran.\tIt fell.\tperhaps\n",
    "header.tsv": "premise\thypothesis\tlabel\n",
    "text.json": "It ran.",
    "nothing.json": '{"version": "1.1", "data": []}',
    "broken.yaml": "a: [1, 2\nb: }",
    "call.yaml": "!!python/object/apply:os.system ['touch pwned']",
    "five.yaml": "distributed_type: MULTI_CPU\nnum_processes: 5\n",
    "two.yaml": f"{MACHINES}machine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 29501\n",
    "text.db": "not a database, but long enough to be read as the header of one " * 3,
    "there.db": "",
    "used/config.yaml": "seed: 0\n",
    "failed/summary.json": '{"status": "FAILED", "error": "x"}',
    "invalid/tracking.json": '{"experiment":',
    "folder/notes.txt": "no run",
    "no-config/model.safetensors": "",
    "published.csv": PUBLISHED,
    "columns.csv": "gpus,seed\n1,0\n",
    "words.csv": PUBLISHED.replace(",80.1,", ",good,"),
}
SWEEP = "2026-01-02_03-04-05-abcd"
COLA = "recipe=cola recipe.model.name=model recipe.data.eval=good.tsv recipe.data.train"
MNLI = "recipe=mnli recipe.model.name=model recipe.data.eval=pairs.tsv recipe.data.train"
OWN = "recipe=text_classification recipe.model.name=model recipe.data.eval=pairs.tsv recipe.data.train"
SQUAD = (
    "recipe=squad recipe.model.name=model recipe.max_length=128 recipe.doc_stride=32 "
    "recipe.data.eval=nothing.json recipe.data.train"
)
CHAT = "recipe=chat recipe.model.name=llama recipe.data.eval=good.tsv recipe.data.train"
PAIRS = "recipe=seq2seq recipe.model.name=t5 recipe.data.eval=good.tsv recipe.data.train"
TEXT = "recipe=causal_lm recipe.model.name=llama recipe.data.eval=word.tsv recipe.data.train"
ACCELERATE = "device=from_accelerate device.file"
NO_RUN = "0" * 32
#: What is typed, after `python -m`, and what the sentence must name. HTML and NOTHING are servers that are no MLflow.
WRONG: list[tuple[str, ...]] = [
    # Names and syntax
    ("runner epoch=3", "'epoch'", "'epochs'"),
    ("runner +epochz=3", "'epochz'", "'epochs'"),
    ("runner +optimizer.foo=1", "optimizer.foo"),
    ("runner optimzer.lr=1", "optimzer.lr", "'optimizer.lr'"),
    ("runner global_batch=96", "'global_batch'", "'batch.global_batch'"),
    ("runner lr=1e-4", "'lr'", "'optimizer.lr'"),
    ("runner model=bert", "'model'", "'recipe.model.name'"),
    ("runner schedule.reference_batch=32", "'schedule.reference_batch'", "'scaling.reference_batch'"),
    ("runner recipe.model.hiden_size=64", "recipe.model.hiden_size", "'recipe.model.hidden_size'"),
    ("runner devise=cpu", "'devise'", "'device'"),
    ("runner device=cpux", "device=cpux", "'cpu'"),
    ("runner device=gpu9", "device=gpu9", "device=gpu device.workers=9"),
    ("runner device=tpu4", "device=tpu4", "device=tpu8 device.workers=4"),
    ("runner device=cuda", "device=cuda", "write device=gpu"),
    ("runner device=", "device"),
    ("runner recipe=colla", "recipe=colla", "'cola'"),
    ("runner optimizer=adamW2", "optimizer=adamW2", "'adamw'"),
    ("runner experiment=localsgd", "experiment=localsgd", "'local_sgd'"),
    ("runner recipe=text_classification recipe.data.streaming=true", "recipe.data.streaming", "ledger"),
    ("runner profile.steps=2 profile.skip=0", "profile.skip=0", "at least 1"),
    ("runner profile.steps=5 max_steps=12", "profile.steps=5", "profile.skip=10", "2 optimizer steps"),
    ("runner profile.steps=5 device=tpu8", "profile.steps"),
    ("runner adapter=qlroa", "adapter=qlroa", "'qlora'"),
    ("runner +load_in_4bit=true", "'load_in_4bit'", "'adapter=qlora'"),
    ("runner fsdp=full_shard", "'fsdp'", "'sharding=fsdp'"),
    ("runner sharding=fsdp sync.k=4 device=cpu2", "sync.k=4", "sharding=fsdp"),
    ("runner sharding=fsdp device=tpu8", "sharding=fsdp", "sharding=none"),
    ("runner sharding=fsdp optimizer=adafactor", "optimizer", "adafactor", "adamw"),
    ("runner sharding=fsdp optimizer=muon", "optimizer", "muon", "adamw"),
    ("runner sharding=fsdp sharding.param_dtype=bf16", "sharding.param_dtype", "precision=bf16"),
    ("runner sharding=fsdp sharding.param_dtype=fp16", "sharding.param_dtype", "bf16"),
    ("runner sharding.param_dtype=bf16", "sharding.param_dtype", "sharding=fsdp"),
    ("runner scaling.rule=cube", "scaling.rule", "cube"),
    ("runner seed", "'seed'", "setting=value"),
    ("runner epochs = 3", "'epochs'", "setting=value", "blanks"),
    ("runner epochs= 3", "'3'", "setting=value"),
    ("runner =3", "=3"),
    ("runner ~seed", "seed"),
    ("runner 'seed=${nope}'", "seed", "'nope'"),
    ("runner device=[cpu", "device=[cpu"),
    ("runner recipe.data.train=a b.tsv", "'b.tsv'"),
    ("runner cache_dir=~/x", "cache_dir=~/x", "$HOME"),
    ("runner device.length_buckets=16", "device.length_buckets", "list"),
    ("runner device.length_buckets=16,32", "device.length_buckets=16,32", "[16,32]", "-m"),
    ("runner seed=0,1", "seed=0,1", "-m"),
    ("runner --frobnicate", "--frobnicate"),
    ("runner --epochs 3", "--epochs"),
    ("runner --config-dir=/nowhere/at/all", "--config-dir=/nowhere/at/all"),
    ("runner --config-name=other", "--config-name"),
    ("runner --experimental-rerun=x.pickle", "--experimental-rerun"),
    # Values
    ("runner seed=abc", "seed", "'abc'"),
    ("runner seed=99999999999", "seed=99999999999"),
    ("runner epochs=1.5", "epochs", "'1.5'"),
    ("runner compile=maybe", "compile", "'maybe'"),
    ("runner ledger=ignore", "ledger", "'ignore'", "warn"),
    ("runner batch.global_batch=1.5", "batch.global_batch", "1.5"),
    ("runner batch.global_batch=50 device=cpu8", "batch.global_batch=50", "8", "48 and 56"),
    ("runner batch.global_batch=4 device=cpu8", "batch.global_batch=4", "8"),
    ("runner batch=per_device accumulation=auto", "accumulation=auto"),
    ("runner batch.drop_last=true batch.global_batch=96 recipe.data.train_samples=50", "batch.drop_last=true", "50"),
    ("runner recipe.data.train_samples=10 device.workers=4 accumulation.steps=12", "48 micro-batches", "10"),
    ("runner optimizer.lr=1,5e-4", "optimizer.lr=1,5e-4"),
    ("runner optimizer.betas=[0.9,x]", "optimizer.betas", "'x'"),
    ("runner sync.k=64 max_steps=9 device=cpu2", "sync.k=64", "9"),
    ("runner sync.k=4 sync.fragments=2.5 device=cpu2", "sync.fragments is invalid", "'2.5' is no whole number"),
    ("runner evaluation.every_steps=6 sync.k=4 device=cpu2", "evaluation.every_steps=6", "sync.k=4", "4 or 8"),
    ("runner evaluation.every_steps=3 sync.k=4 device=cpu2", "evaluation.every_steps=3", "such as 4"),
    ("runner sync.k=16 sync.schedule=post_local max_steps=30 device=cpu2", "sync.k=16", "sync.k=15 or less"),
    ("runner evaluation.metric=f1", "evaluation.metric=f1", "accuracy"),
    ("runner evaluation.metric=accuracy evaluation.goal=min", "evaluation.goal=min"),
    ("runner evaluation.metric=loss evaluation.goal=max", "evaluation.goal=max", "evaluation.goal=min"),
    ("runner recipe.data.train_samples=many", "recipe.data.train_samples=many"),
    ("runner recipe.data=null", "recipe.data=null"),
    ("runner recipe.model=bert", "recipe.model=bert"),
    ("runner recipe.model.name=bert-base-uncased", "recipe.model.name"),
    ("runner plan.train_samples=5", "plan.train_samples"),
    ("runner plan.price_per_hour=5", "plan.price_per_hour=5", "runner.plan"),
    ("runner measure=true", "measure=true", "runner.plan"),
    ("runner -m measure=true seed=0,1", "measure=true", "runner.plan"),
    # Devices
    ("runner device=gpu4 device.rehearse=never", "device.kind=gpu", "device.rehearse=auto"),
    ("runner device=tpu8 precision=fp16", "precision=fp16", "TPU"),
    ("runner device=cpu precision=tf32", "precision=tf32"),
    ("runner device=from_accelerate", "device.file"),
    ("runner device=cpu device.file=five.yaml", "device.file=five.yaml", "device=from_accelerate"),
    ("runner precision.name=from_accelerate", "precision=from_accelerate"),
    *(
        (f"runner {ACCELERATE}={file}", f"device.file={file}", *named)
        for file, *named in (
            ("missing.yaml", "check the path"),
            ("two.yaml", "torchrun --nnodes 2", "--node-rank 1"),
            ("broken.yaml",),
            ("call.yaml",),
        )
    ),
    (f"runner {ACCELERATE}=five.yaml", "batch.global_batch=48", "5", "45 and 50"),
    # Data
    ("runner recipe=cola recipe.model.name=model", "recipe.data.train=", "recipe.data.eval="),
    ("runner recipe=cola recipe.data.train=good.tsv recipe.model.name=model", "recipe.data.eval"),
    (f"runner {COLA}=missing.tsv", "recipe.data.train=missing.tsv", "does not exist"),
    (f"runner {COLA}=word.tsv", "recipe.data.train=word.tsv", "line 1", "yes"),
    (f"runner {COLA}=good.tsv recipe.data.label_column=3", "recipe.data.train=good.tsv", "label"),
    (f"runner {COLA}=missing.tsv recipe.max_length=1000", "recipe.max_length=1000", "128"),  # before data are read
    (f"runner {MNLI}=unknown.tsv", "recipe.data.train=unknown.tsv", "perhaps"),
    (f"runner {OWN}=header.tsv", "recipe.data.train=header.tsv"),
    ("runner recipe=text_classification recipe.model.name=model", "recipe.data.train="),
    (f"runner {SQUAD}=text.json", "recipe.data.train=text.json"),
    (f"runner {TEXT}=empty.tsv", "recipe.data.train=empty.tsv"),
    (f"runner {CHAT}=good.tsv", "recipe.data.train=good.tsv", "recipe.data.messages_column"),
    (f"runner {PAIRS}=good.tsv", "recipe.data.train=good.tsv", "'source'"),
    # Models
    (f"runner {COLA}=good.tsv recipe.model.name=./missing", "recipe.model.name=./missing"),
    (f"runner {COLA}=good.tsv recipe.model.name=no-config", "recipe.model.name=no-config", "config.json"),
    (f"runner {COLA}=good.tsv recipe.model.name=truncated", "recipe.model.name=truncated", "model.safetensors"),
    (f"runner {COLA}=good.tsv recipe.model.name=bert-base-uncasd", "recipe.model.name=bert-base-uncasd"),
    ("runner recipe=squad recipe.model.name=bert-large-uncased", "recipe."),
    # Code
    ("runner recipe._target_=os.system", "recipe._target_=os.system", "trusted_packages"),
    ("runner recipe.data._target_=subprocess.run", "recipe.data._target_=subprocess.run", "trusted_packages"),
    ("runner recipe._target_=recipes.nowhere.X", "recipe._target_=recipes.nowhere.X"),
    ("runner trusted_packages=mine", "trusted_packages"),
    # Folders
    ("runner hydra.run.dir=good.tsv/run", "hydra.run.dir=good.tsv/run", "file"),
    ("runner hydra.run.dir=used", "hydra.run.dir=used"),
    ("runner hydra.run.dir=/proc/foo", "hydra.run.dir=/proc/foo"),
    (f"runner hydra.run.dir=a/{'x' * 300}", "hydra.run.dir=a/xxx"),
    ("runner cache_dir=/proc/foo", "cache_dir=/proc/foo"),
    ("RUNNER_CACHE=/proc/foo runner", "cache_dir=/proc/foo"),
    ("runner recipe.metric=null evaluation.metric=loss", "recipe.metric "),
    ("runner recipe.name=../../x", "recipe.name=../../x"),
    # Tracking
    ("runner tracking=[mlflow,tensorbord]", "tensorbord", "'tensorboard'"),
    ("runner tracking.uri=http://me:secret@127.0.0.1:9", "***@127.0.0.1:9", "does not answer"),
    ("runner tracking.uri=HTML", "tracking.uri=http://127.0.0.1", "text/html", "tracking=none"),
    ("runner tracking.uri=NOTHING/base", "tracking.uri=http://127.0.0.1", "404", "tracking=none"),
    ("MLFLOW_TRACKING_URI=HTML runner", "tracking.uri=http://127.0.0.1", "text/html"),
    ("runner tracking.uri=localhost:5000", "tracking.uri=localhost:5000", "http://"),
    ("runner tracking.uri=http://", "tracking.uri=http://"),
    ("runner tracking.uri=http://127.0.0.1:99999", "tracking.uri=http://127.0.0.1:99999"),
    ("runner tracking.uri=http://[::1", "tracking.uri=http://[::1"),
    ("runner tracking.uri=sqlite://x.db", "tracking.uri=sqlite://x.db", "sqlite:///"),
    ("runner tracking.uri=sqlite:///good.tsv/x.db", "tracking.uri", "good.tsv"),
    ("runner tracking.uri=sqlite:///folder", "tracking.uri=sqlite:///folder"),
    ("runner tracking.uri=sqlite:///text.db", "tracking.uri=sqlite:///text.db", "SQLite"),
    ("runner tracking.uri=good.tsv", "tracking.uri=good.tsv"),
    (f"MLFLOW_RUN_ID={NO_RUN} runner", f"MLFLOW_RUN_ID={NO_RUN}"),
    (f"MLFLOW_RUN_ID={NO_RUN} runner -m seed=0,1", "MLFLOW_RUN_ID"),
    # Sweeps
    ("runner sweep=kbatch", "sweep=", "-m"),
    ("runner -m sweep=kbach", "sweep=kbach", "'kbatch'"),
    ("runner seed=auto", "seed=auto", "add -m"),
    ("runner -m seed=auto", "seed=auto", "vary something else"),
    ("runner -m device=cpu,cpu2 seed=auto,1", "seed", "'auto'"),
    ("runner -m device=cpu,cpu2 seed=auto decide.min_seeds=1", "decide.min_seeds=1"),
    ("runner -m device=cpu,cpu2 seed=0,1 decide.margin=1", "decide.margin=1", "seed=auto"),
    ("runner decide.max_minutes=5", "decide.max_minutes=5", "seed=auto"),
    ("runner -m recipe=linear device=cpu,cpu2 seed=auto", "decide.margin", "loss"),
    ("runner -m device=cpu,cpu2 seed=auto seed=1", "seed=auto", "give one"),
    ("runner -m device=cpu,cpu2 seed=auto decide.margin=200", "decide.margin=200", "accuracy"),
    ("runner decide.race=true", "decide.race=true", "add -m"),
    ("runner -m seed=0,1 decide.race=true", "decide.race=true", "optimizer.lr"),
    ("runner -m optimizer.lr=1e-3,2e-3 decide.race=true,false", "decide.race", "give one"),
    ("runner -m optimizer.lr=1e-3,2e-3 seed=auto decide.race=true", "seed=auto", "decide.race=true"),
    ("runner -m optimizer.lr=1e-3,2e-3 decide.race=true decide.max_minutes=5", "decide.max_minutes=5", "seed=auto"),
    ("runner -m evaluation.metric=accuracy,matthews decide.race=true", "decide.race=true", "evaluation.metric"),
    ("runner -m hydra/sweeper=optuna optimizer.lr=1e-3,2e-3 decide.race=true", "decide.race=true", "hydra/sweeper"),
    ("runner -m seed=0,-1", "seed=-1"),
    ("runner -m seed=", "seed"),
    ("runner -m 'seed=range(0,3'", "seed=range(0,3"),
    ("runner -m seed=0, 1", "'seed=0,'", "blank"),
    ("runner -m device=cpu,cpu2,gpux seed=0,1", "device=gpux"),
    ("runner -m device.workers=1,3 batch.global_batch=48,50", "device.workers=3", "batch.global_batch=50", "48 and 51"),
    ("runner -m seed=0,1 cache_dir=/proc/foo", "cache_dir=/proc/foo"),
    ("runner -m seed=0,1 hydra.sweep.dir=/proc/foo", "hydra.sweep.dir=/proc/foo"),
    ("runner -m recipe=acceptability,cola seed=0", "recipe=cola"),
    ("runner -m seed=0 optimizer.lr=interval(1e-5,1e-3)", "optimizer.lr=interval(1e-5,1e-3)", "optuna"),
    ("runner -m seed=0,1 tracking.uri=http://me:secret@127.0.0.1:9", "***@127.0.0.1:9", "MLFLOW_TRACKING_URI"),
    ("runner -m seed=0 '+recipe.more={one: 1, api_key: abc-secret}'", "recipe.more.api_key=***", "'${oc.env:NAME}'"),
    ("runner -m seed=0,1 hydra/launcher=joblib hydra.launcher.n_jobs=0", "hydra.launcher.n_jobs=0"),
    ("runner -m seed=0,1 device=cpu hydra/launcher=joblib hydra.launcher.n_jobs=4096", "n_jobs=4096", "use at most"),
    ("runner -m seed=0,1 device=gpu8 device.rehearse=never hydra/launcher=joblib", "with 8 worker(s)", "device=cpu"),
    ("runner resume_sweep=x", "resume_sweep=x", "-m"),
    ("runner -m resume_sweep=2026-01-02_03-04-05-abce", f"'{SWEEP}'"),
    (f"runner -m resume_sweep=outputs/sweeps/{SWEEP}/0", "resume_sweep="),
    ("runner -m resume_sweep=a,b", "resume_sweep=a,b"),
    ("runner -m ~resume_sweep", "resume_sweep"),
    (f"runner -m resume_sweep={SWEEP} resume_sweep=other", "resume_sweep"),
    (f"runner -m resume_sweep={SWEEP} device=gpux", "device=gpux"),
    (f"runner -m resum_sweep={SWEEP}", "resum_sweep"),
    (f"runner -m seed=0 hydra.sweep.dir=outputs/sweeps/{SWEEP}", "hydra.sweep.dir=", "resume_sweep="),
    ("SLURM_STEP_NUM_TASKS=4 runner", "srun", "torchrun"),
    ("RANK=0 WORLD_SIZE=2 runner", "MASTER_ADDR", "torchrun"),
    ("RANK=zero WORLD_SIZE=2 runner", "RANK"),
    # runner.plan
    ("runner.plan batch.global_batch=50 device=cpu8", "batch.global_batch=50", "8"),
    ("runner.plan -m batch.global_batch=48,50 device=cpu8", "batch.global_batch=50", "8"),
    ("runner.plan -m seed=0,1 plan.csv=good.tsv", "plan.csv=good.tsv"),
    ("runner.plan plan.csv=new.csv", "plan.csv=new.csv", "-m"),
    ("runner.plan -m seed=0,1 plan.plot=new.png", "plan.plot=new.png", "plan.scale"),
    ("runner plan.csv=new.csv", "plan.csv=new.csv", "runner.plan"),
    ("runner hardware=a100", "hardware=A100", "runner.plan"),
    ("runner plan.tokens=5", "plan.tokens=5", "runner.plan"),
    ("runner.plan hardware=a1000", "hardware=a1000", "a100"),
    ("runner.plan link=pcie3", "link=", "hardware"),
    ("runner.plan device=cpu hardware=a100", "hardware=A100", "cpu is here"),
    ("runner.plan device=gpu4 hardware=a100 hardware.link_gb_per_s=0", "hardware.link_gb_per_s=0"),
    ("runner.plan device=gpu4 hardware=a100 +hardware.tflops.int3=5", "hardware.tflops=int3"),
    ("runner.plan device=gpu4 hardware=t4 precision=bf16 plan.parameters=1000", "precision=bf16", "fp32"),
    ("runner.plan device=gpu4 hardware=t4", "plan.parameters=N"),
    ("runner.plan device=gpu4 hardware=t4 plan.parameters=1e6 plan.train_samples=500 recipe=mnli", "plan.tokens=N"),
    ("runner.plan recipe=cola", "plan.train_samples=N"),
    ("runner.plan plan.price_per_hour=0", "plan.price_per_hour=0"),
    ("runner.plan measure=true device=tpu8", "measure=true", "tpu8"),
    ("runner.plan measure=true recipe=mnli plan.train_samples=500", "measure=true", "data"),
    ("runner.plan measure=true equivalence=identical", "measure=true", "equivalence=identical"),
    ("runner.plan measure=true device=cpu2 sync.k=4 sync.schedule=post_local", "measure=true", "sync.schedule"),
    # runner.verify
    ("runner.verify --a device=cpu", "--b"),
    ("runner.verify", "--a", "--b"),
    ("runner.verify --a '' --b '' --steps 0", "--steps=0"),
    ("runner.verify --a device=cpu --b device=cpuu", "setup b", "device=cpuu"),
    ("runner.verify --a seed=0,1 --b ''", "setup a"),
    ("runner.verify --a \"'device=cpu\" --b ''", "--a='device=cpu"),
    ("runner.verify --a '' --b '' --json no/where.json", "--json=no/where.json"),
    ("runner.verify --a '' --b '' --config-dir nowhere", "--config-dir=nowhere"),
    ("runner.verify --a compile=true --b '' equivalence=exact", "setup a", "compile=true"),
    ("runner equivalence=identical sync.k=4", "sync.k=4", "sync.k=1"),
    ("runner equivalence=identical sync=outer sync.k=1", "sync=periodic"),
    ("runner equivalence=identical batch=per_device", "batch=fixed_global"),
    ("runner equivalence=identical sync.compress=bf16", "sync.compress=bf16", "sync.compress=none"),
    ("runner equivalence=identical sharding=fsdp", "sharding=fsdp", "sharding=none"),
    ("runner equivalence=exact equivalence.shards=4", "equivalence.shards=4", "equivalence=identical"),
    ("runner equivalence=identical device.workers=9", "equivalence.shards=8", "9 workers"),
    ("runner equivalence=identical accumulation.steps=9", "accumulation.steps=9", "equivalence.shards=9"),
    ("RANK=0 WORLD_SIZE=2 runner.verify --a '' --b ''", "torchrun"),
    # runner.compare
    ("runner.compare", "--csv FILE"),
    ("runner.compare nothing", "nothing", "neither a folder nor an MLflow run id"),
    ("runner.compare folder", "folder", "holds no run"),
    ("runner.compare failed", "no finished run", "failed: FAILED"),
    ("runner.compare folder --csv published.csv", "RUN and --csv"),
    ("runner.compare --sweep a --experiment b", "--experiment and --sweep"),
    ("runner.compare --csv missing.csv", "--csv=missing.csv"),
    ("runner.compare --csv folder", "--csv=folder"),
    ("runner.compare --csv binary.tsv", "--csv=binary.tsv"),
    ("runner.compare --csv columns.csv", "--csv=columns.csv", "metric"),
    ("runner.compare --csv words.csv", "--csv=words.csv", "good"),
    ("runner.compare --csv published.csv --margin 0", "--margin=0"),
    ("runner.compare --csv published.csv --margin 100", "--margin=100", "percentage points"),
    ("runner.compare --csv published.csv --metric f1", "--metric=f1"),
    ("runner.compare --csv published.csv --baseline 1", "--baseline=1", "1 GPU"),
    ("runner.compare --csv published.csv --out used", "--out=used"),
    ("runner.compare --csv published.csv --out published.csv/x", "--out=published.csv/x", "is a file"),
    ("runner.compare --experiment x", "--tracking-uri", "outputs/mlflow.db"),
    (f"runner.compare {NO_RUN} --tracking-uri sqlite:///text.db", "--tracking-uri=sqlite:///text.db"),
    (f"runner.compare {NO_RUN} --tracking-uri mlruns", "--tracking-uri=mlruns", "does not exist"),
    (f"runner.compare {NO_RUN} --tracking-uri http://me:secret@127.0.0.1:9", "http://***@127.0.0.1:9"),
    (f"runner.compare {NO_RUN} --tracking-uri HTML", "--tracking-uri=http://127.0.0.1"),
    # runner.track
    ("runner.track", "command"),
    ("runner.track sync", "FOLDER"),
    ("runner.track sync nowhere", "nowhere"),
    ("runner.track sync folder", "folder", "tracking.json"),
    ("runner.track sync hidden", "credentials", "--tracking-uri"),
    ("runner.track sync invalid", "invalid", "tracking.json"),
    ("runner.track sync logged", "127.0.0.1:9"),
    ("runner.track sync logged --tracking-uri http://me:secret@127.0.0.1:9", "***@127.0.0.1:9"),
    ("runner.track sync logged --tracking-uri sqlite:///text.db", "sqlite:///text.db", "SQLite"),
    ("runner.track sync logged --tracking-uri HTML", "http://127.0.0.1", "text/html"),
    ("runner.track ui", "outputs/mlflow.db"),
    ("runner.track ui --tracking-uri sqlite:///there.db --port 99999", "--port=99999"),
    ("runner.track ui --tracking-uri sqlite:///text.db", "sqlite:///text.db", "SQLite"),
    ("runner.track ui --tracking-uri http://127.0.0.1:9", "http://127.0.0.1:9"),
]


class NoMlflow(http.server.BaseHTTPRequestHandler):
    """A page for every address, or, on `NOTHING`, none."""

    status = 200

    def do_GET(self) -> None:
        body = b"<!doctype html>\n<html><body>Welcome to nginx</body></html>"
        self.send_response(self.status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""


class NoPage(NoMlflow):
    status = 404


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """The addresses of two servers that are no MLflow."""
    found = {name: http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) for name, kind in SERVERS.items()}
    for server in found.values():
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield {name: f"http://127.0.0.1:{server.server_port}" for name, server in found.items()}
    for server in found.values():
        server.shutdown()
        server.server_close()


SERVERS = {"HTML": NoMlflow, "NOTHING": NoPage}


@pytest.fixture(scope="module")
def keys() -> list[str]:
    return known_keys()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of every command: as none may change anything in it, all use the same one."""
    root = tmp_path_factory.mktemp("given")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for name, store in (("logged", "http://127.0.0.1:9"), ("hidden", "http://***@host")):
        (root / name).mkdir()
        TrackingRecord("mine", name, {}, {}, store).write(root / name)
    sweep_in(root / "outputs" / "sweeps" / SWEEP).write()
    save_bert(root / "model", ["Hello there not", "It ran fell yes"])
    save_llama(root / "llama", positions=1024)
    save_t5(root / "t5")
    shutil.copytree(root / "model", root / "truncated")
    weights = (root / "truncated" / "model.safetensors").read_bytes()
    (root / "truncated" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return root


def content(root: Path) -> dict[Path, tuple[int, int]]:
    """Everything below a folder, with the size of each file and when it was written."""
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else (0, 0) for path in root.rglob("*")
    }


@pytest.mark.parametrize(("typed", "named"), [(typed, named) for typed, *named in WRONG], ids=[one[0] for one in WRONG])
def test_wrong_input(
    typed: str,
    named: list[str],
    given: Path,
    keys: list[str],
    servers: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2 and one line that names the setting and the fix; no folder, no store, no run, no cache."""
    monkeypatch.chdir(given)
    monkeypatch.setenv("RUNNER_CACHE", str(given / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("runner.config.compose.known_keys", lambda *_: keys)  # slow to compose each time
    before = content(given)
    for name, address in servers.items():
        typed = typed.replace(name, address)
    words = shlex.split(typed)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert COMMANDS[words[0]](words[1:]) == cli.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    assert "secret" not in line
    assert "<" not in line
    assert not [part for part in named if part not in line]
    assert content(given) == before
