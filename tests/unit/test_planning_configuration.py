"""Configuration files: accelerate's YAML, our TOML, DeepSpeed's JSON; the line outdoes them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.planning.configuration import configured, over
from jupyter_torchdist.planning.strategy import plan_strategy
from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.protocol.plan import NodePlan
from jupyter_torchdist.protocol.spec import Options
from jupyter_torchdist.protocol.strategy import StrategyPlan

PAGE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""Keys and values of the example in the FSDP guide of Transformers, as `accelerate config` writes them."""
FLAT = PAGE.replace("  fsdp_", "fsdp_")
"""As the guide prints it: the indentation is lost."""


def read(tmp_path: Path, text: str, line: str = "", name: str = "c.yaml") -> Options:
    """The options of a line beside a file."""
    (tmp_path / name).write_text(textwrap.dedent(text))
    return configured(f"--config {name} {line}", tmp_path)


def planned(options: Options) -> StrategyPlan:
    ranks = options.ranks or options.gpus or 2
    return plan_strategy(options, ranks, (NodePlan("node0", tuple(range(ranks))),))


@pytest.mark.parametrize("text", [PAGE, FLAT], ids=["indented", "flat"])
def test_the_guides_own_example(tmp_path: Path, text: str) -> None:
    options = read(tmp_path, text)
    assert (options.gpus, options.precision, options.strategy) == (2, "bf16", "fsdp")
    plan = planned(options)
    assert plan.degrees == {"dp_shard": 2}
    assert plan.options == {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "backward_prefetch": "BACKWARD_PRE",
        "cpu_ram_efficient_loading": True,
        "forward_prefetch": False,
        "cpu_offload": True,
        "sharding_strategy": "FULL_SHARD",
        "reshard_after_forward": True,
        "state_dict_type": "SHARDED_STATE_DICT",
        "sync_module_states": True,
        "transformer_layer_cls_to_wrap": ("BertLayer",),
        "use_orig_params": True,
    }
    assert "main_training_function, same_network: needless here" in plan.notes[0]


def test_the_line_outdoes_the_file(tmp_path: Path) -> None:
    options = read(tmp_path, PAGE, "--ranks 4 --precision fp32 -O cpu_offload=0")
    assert (options.ranks, options.gpus, options.precision) == (4, None, "fp32")
    assert planned(options).options["cpu_offload"] is False
    assert options.config == str(tmp_path / "c.yaml")


def test_another_strategy_in_the_line_leaves_out_what_it_has_not(tmp_path: Path) -> None:
    options = read(tmp_path, PAGE, "--ranks 2 --strategy ddp")
    plan = planned(options)
    assert (plan.name, plan.options, plan.precision) == ("ddp", {}, "bf16")
    assert any("cpu_offload" in note and "ddp has no such option" in note for note in plan.notes)
    assert planned(read(tmp_path, PAGE, "--ranks 2 --strategy none")) == StrategyPlan()


def test_names_that_the_guide_writes_otherwise(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_wrap_policy: SIZE_BASED_WRAP\nmin_num_param: 20000\n"
    assert planned(read(tmp_path, text)).options == {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 20000}


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("distributed_type: NO\nmixed_precision: no\n", {"gpus": 1, "strategy": "ddp", "precision": "fp32"}),
        ("distributed_type: MULTI_CPU\nnum_processes: 3\nuse_cpu: true\n", {"ranks": 3, "strategy": "ddp"}),
        ("distributed_type: FSDP\nnum_processes: 3\nuse_cpu: true\n", {"ranks": 3, "strategy": "fsdp"}),
        ("distributed_type: MULTI_GPU\nnum_processes: -1\n", {"gpus": None, "strategy": "ddp"}),
        ("distributed_type: MULTI_GPU\ngpu_ids: 0, 1\n", {"env": ("CUDA_VISIBLE_DEVICES=0,1",)}),
        ("distributed_type: MULTI_GPU\nenable_cpu_affinity: true\n", {"numa_binding": "node"}),
        ("distributed_type: MULTI_GPU\nfp16: true\n", {"precision": "fp16"}),
        ("distributed_type: MULTI_GPU\ndynamo_backend: INDUCTOR\n", {"compile": True}),
        ("distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: 'NO'}\n", {"compile": False}),
        ("fsdp_config: {fsdp_activation_checkpointing: true}\n", {"activation_checkpointing": True}),
        ("fsdp_config: {fsdp_activation_checkpointing_offload: false}\n", {"activation_checkpointing": False}),
        ("distributed_type: MULTI_GPU\ngradient_accumulation_steps: 4\n", {"grad_accumulation": 4}),
        ("fsdp_config: {fsdp_min_num_params: 2000}\n", {"option": ("min_num_params=2000",)}),
        ("fsdp_config: {fsdp_min_num_params: 0}\n", {"option": ()}),  # older versions always write one
        (
            """\
            distributed_type: MULTI_GPU
            dynamo_config:
              dynamo_backend: INDUCTOR
              dynamo_mode: default
              dynamo_use_dynamic: false
              dynamo_use_fullgraph: false
              dynamo_use_regional_compilation: true
            """,
            {"compile": True},
        ),
        (
            """\
            distributed_type: NO
            command_file: null
            commands: []
            debug: false
            machine_rank: 0
            main_process_ip: 10.0.0.1
            main_process_port: 29500
            rdzv_backend: c10d
            """,
            {"gpus": 1, "env": (), "option": ()},
        ),
        (
            "distributed_type: MULTI_GPU\nparallelism_config: {cp_size: 2, cp_comm_strategy: alltoall}\n",
            {"strategy": "cp", "option": ("cp=2",)},
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}\n",
            {"option": ("version=2", "reshard_after_forward=False")},
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: SHARD_GRAD_OP}\n",
            {"option": ("sharding_strategy=SHARD_GRAD_OP",)},
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_transformer_layer_cls_to_wrap: [A, B]}\n",
            {"option": ("transformer_layer_cls_to_wrap=A,B",)},
        ),
        (
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_dp_shard_size: 2, tp_size: 2}\n",
            {"strategy": "fsdp+tp", "option": ("dp_shard=2", "tp=2")},
        ),
        (
            "distributed_type: FSDP\nparallelism_config: {dp_shard_size: 2, dp_replicate_size: 2, cp_size: 1}\n",
            {"strategy": "hsdp", "option": ("dp_shard=2", "dp_replicate=2")},
        ),
        ("distributed_type: MULTI_GPU\nparallelism_config: {tp_size: 4}\n", {"strategy": "tp", "option": ("tp=4",)}),
    ],
)
def test_each_key_is_honoured(tmp_path: Path, text: str, chosen: dict[str, Any]) -> None:
    options = read(tmp_path, text)
    assert {name: getattr(options, name) for name in chosen} == chosen


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("main_process_ip: 10.0.0.1\n", "main_process_ip: needless here"),
        ("main_process_port: 29500\n", "main_process_port: needless here"),
        (
            "gradient_accumulation_steps: 2\n",
            "gradient_accumulation_steps: a batch of the cell is taken in so many parts",
        ),
        ("dynamo_config: {dynamo_use_regional_compilation: false}\n", "each repeated block is compiled, always"),
        ("parallelism_config: {cp_size: 2, cp_comm_strategy: allgather}\n", "left to the attention that is found"),
    ],
)
def test_what_is_done_in_another_way_is_said(tmp_path: Path, text: str, note: str) -> None:
    notes = planned(read(tmp_path, f"distributed_type: MULTI_GPU\n{text}", "--ranks 2")).notes
    assert any(note in said for said in notes), notes


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("distributed_type: FSDP\nnum_proceses: 2\n", "has no key 'num_proceses'", "did you mean num_processes?"),
        ("fsdp_config: {fsdp_offload_param: true}\n", "has no key 'fsdp_offload_param'", "fsdp_offload_params?"),
        (
            "distributed_type: FSDP\nxla: True\n",
            "xla: true: TPUs (PyTorch/XLA) are not supported",
            "fsdp shards on GPUs",
        ),
        ("fsdp_config: {xla: true, xla_fsdp_settings: {a: 1}}\n", "TPUs (PyTorch/XLA)", "fsdp shards on GPUs"),
        (
            "distributed_type: FSDP\nxla_fsdp_settings:\n  xla_fsdp_grad_ckpt: true\n",
            "xla_fsdp_settings",
            "checkpointing",
        ),
        ("distributed_type: XLA\n", "distributed_type: XLA: TPUs", "FSDP or MULTI_GPU"),
        ("distributed_type: MULTI_GPU\ntpu_use_cluster: true\n", "tpu_use_cluster: true: TPUs", "on GPUs"),
        ("distributed_type: MULTI_GPU\ndowncast_bf16: yes\n", "downcast_bf16: true: it is of TPUs", "bf16"),
        ("distributed_type: MULTI_NPU\n", "distributed_type: MULTI_NPU is not run here", "MULTI_GPU"),
        ("num_processes: 2\n", "distributed_type is missing", "add it with one of NO, MULTI_CPU"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\n", "only this machine", "LOCAL_MACHINE"),
        ("distributed_type: MULTI_GPU\nnum_machines: 2\n", "num_machines: 2: this version", "num_machines: 1"),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp8\n", "there is no fp8 here", "use bf16"),
        (
            "distributed_type: MULTI_GPU\nmixed_precision: bf61\n",
            "expected no, fp16 or bf16",
            "correct mixed_precision",
        ),
        (
            "distributed_type: MULTI_GPU\nnum_processes: two\n",
            "num_processes: two: expected",
            "for example num_processes: 2",
        ),
        (
            "distributed_type: MULTI_GPU\nfp16: true\nmixed_precision: bf16\n",
            "contradict each other",
            "keep mixed_prec",
        ),
        (
            "distributed_type: MULTI_GPU\nuse_cpu: true\n",
            "MULTI_GPU and use_cpu: true contradict",
            "change one of them",
        ),
        ("distributed_type: NO\nnum_processes: 2\n", "NO means one process, but num_processes is 2", "MULTI_GPU"),
        (
            "distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}\n",
            "distributed_type: MULTI_GPU and fsdp_config contradict",
            "distributed_type: FSDP",
        ),
        (
            "distributed_type: FSDP\nfsdp_offload_params: true\nfsdp_config: {fsdp_offload_params: false}\n",
            "fsdp_offload_params is",
            "keep one of the two lines",
        ),
        ("fsdp_version: 1\nfsdp_version: 2\n", "fsdp_version stands there 2 times", "correct the file"),
        ("fsdp_config: {fsdp_sharding_strategy: 6}\n", "6: expected one of FULL_SHARD", "correct fsdp_sharding_str"),
        ("fsdp_config: {fsdp_state_dict_type: LOCAL_STATE_DICT}\n", "FSDP1's flat shards", "SHARDED_STATE_DICT"),
        ("fsdp_config: 3\n", "3 is not a table", "indent the lines"),
        ("distributed_type: FSDP\ndynamo_config: {dynamo_backend: EAGER}\n", "with Inductor", "torch.compile"),
        ("distributed_type: FSDP\nfp8_config: {backend: TE}\n", "fp8_backend: TE: there is no fp8", "leave fp8_config"),
        (
            "fsdp_config: {fsdp_activation_checkpointing_offload: true}\n",
            "fsdp_activation_checkpointing_offload: true: activations are computed again or kept, not offloaded",
            "fsdp_activation_checkpointing: true alone",
        ),
        *(
            (
                f"distributed_type: FSDP\ndynamo_config: {{{key}: {value}}}\n",
                f"{key}: {value}: blocks are",
                "torch.comp",
            )
            for key, value in (
                ("dynamo_mode", "max-autotune"),
                ("dynamo_use_fullgraph", "true"),
                ("dynamo_use_dynamic", "true"),
            )
        ),
        *(
            (f"distributed_type: MULTI_GPU\n{key}: {value}\n", f"{key}: {shown}: {reason}", hint)
            for key, value, shown, reason, hint in (
                ("command_file", "a.sh", "a.sh", "this version runs on one machine", "leave it out"),
                ("commands", "[ls]", '["ls"]', "this version runs on one machine", "leave it out"),
                ("commands", "ls", "ls", "this version runs on one machine", "leave it out"),
                (
                    "debug",
                    "true",
                    "true",
                    "the check of accelerate's own collectives",
                    "TORCH_DISTRIBUTED_DEBUG=DETAIL",
                ),
                ("machine_rank", "1", "1", "one machine has number 0 alone", "machine_rank: 0"),
                ("rdzv_backend", "etcd", "etcd", "ranks meet at a store of ours", "leave it out"),
            )
        ),
        ("distributed_type: FSDP\nmpirun_config: {mpirun_ccl: '1'}\n", "not by mpirun", "leave mpirun_config out"),
        (
            "megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2}\n",
            "Megatron's own models",
            "--strategy tp+pp -O tp=2 -O pp=2",
        ),
        ("distributed_type: FSDP\nparallelism_config: {sp_size: 2}\n", "Ulysses of DeepSpeed", "cp_size"),
        (
            "distributed_type: FSDP\nparallelism_config: {cp_size: 2, cp_comm_strategy: ring}\n",
            "cp_comm_strategy: ring: expected allgather or alltoall",
            "correct parallelism_config_cp_comm_strategy",
        ),
        ("deepspeed_config: {zero_stag: 2}\n", "has no key 'zero_stag'", "did you mean zero_stage?"),
        ("deepspeed_config: {deepspeed_hostfile: a}\n", "one machine", "leave deepspeed_hostfile out"),
        (
            "deepspeed_config: {deepspeed_config_file: no.json}\n",
            "no.json cannot be read",
            "correct the file, or its path",
        ),
        ("a: [\n", "cannot be read", "correct the file"),
        ("- 1\n", "has no keys", "distributed_type: FSDP"),
    ],
)
def test_each_key_that_cannot_be_is_refused_by_name(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(tmp_path, text)
    assert message in caught.value.message and str(tmp_path) in caught.value.message
    assert hint in caught.value.hint


def test_our_own_toml(tmp_path: Path) -> None:
    text = "ranks = 4\nstrategy = 'fsdp+tp'\ncompile = true\n[option]\ntp = 2\ncpu_offload = true\n"
    options = read(tmp_path, text, "-O tp=4", "x.toml")
    assert (options.ranks, options.compile) == (4, True)
    assert options.option == ("tp=2", "cpu_offload=true", "tp=4")
    with pytest.raises(OptionError, match=r"x\.toml: there is no option 'rank'"):
        read(tmp_path, "rank = 2", "", "x.toml")


DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999]}},
}


def test_deepspeeds_json_is_kept_whole(tmp_path: Path) -> None:
    options = read(tmp_path, json.dumps(DEEPSPEED), "--ranks 2", "ds.json")
    plan = planned(options)
    assert (plan.name, plan.precision, plan.options["config"]) == ("deepspeed", "bf16", DEEPSPEED)
    assert plan.notes == (
        "ZeRO stage 2",
        "DeepSpeed's train_batch_size: filled in from the model, the optimizer and the options",
    )


def test_deepspeed_through_accelerate(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    options = read(tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n")
    assert planned(options).options["config"] == DEEPSPEED
    text = "deepspeed_config: {zero_stage: 3, offload_param_device: cpu, gradient_accumulation_steps: 4}\n"
    plan = planned(read(tmp_path, text))
    assert plan.options["config"]["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
    assert plan.grad_accumulation == 4


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        ({}, "--precision fp16", "--precision fp16 and the DeepSpeed configuration (bf16) contradict"),
        ({"fp16": {"enabled": True}}, "", "fp16 and bf16 are both enabled"),
        ({"zero_optimization": {"stage": 4}}, "", "stage must be 0, 1, 2 or 3, not 4"),
        ({"gradient_accumulation_steps": 2}, "--grad-accumulation 3", "contradict each other"),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
            "",
            "train_batch_size is 8, but 2 a micro-batch x 3 accumulated x 2 ranks is 12",
        ),
        ({"train_batch_size": 9}, "", "train_batch_size 9 does not divide by 1 accumulated x 2 ranks"),
        ({"zero_optimization": {"stage": 0}}, "", "stage 0 in bf16 is not supported"),
        (
            {"tensor_parallel": {"autotp_size": 2}},
            "",
            "DeepSpeed's tensor_parallel is not supported: use --strategy tp",
        ),
        (
            {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
            "",
            "DeepSpeed's zenflow is not supported",
        ),
        (
            {"gradient_allreduce_op": "sum"},
            "",
            "gradient_allreduce_op adds gradients over ranks, but one device takes their mean",
        ),
        ({"managed_gradient_accumulation": False}, "", "managed_gradient_accumulation: false is not supported"),
        ({}, "--strategy fsdp", "is a configuration of DeepSpeed, which --strategy fsdp cannot use"),
    ],
)
def test_what_contradicts_deepspeeds_json(tmp_path: Path, change: dict[str, Any], line: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        planned(read(tmp_path, json.dumps(DEEPSPEED | change), f"--ranks 2 {line}", "ds.json"))
    assert message in caught.value.message


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the ending of the file does not tell its format"):
        read(tmp_path, "", name="c.ini")
    with pytest.raises(OptionError, match="cannot be read"):
        configured("--config nowhere.yaml", tmp_path)


def test_gpus_outdo_ranks_and_the_other_way_round() -> None:
    assert over("--gpus 2", Options(ranks=3)) == Options(gpus=2)
    assert over("--ranks 2", Options(gpus=3, backend="nccl")) == Options(ranks=2)
