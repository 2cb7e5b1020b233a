"""The programs as a small grammar, which writes the list of acts that a plan asks for."""

import random
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.analysis.kernels.drawn_plans import STYLES, Part, Pause, Plan

MAIN, AUTOGRAD, LOADING = 1, 2, 3
COMPUTE, COPIES, SIDE, COMMUNICATION = 7, 13, 17, 20
MICROSECOND, MILLISECOND = 1_000, 1_000_000

_GRAMMAR = """
program: around?around{ train*steps?kind=training infer*steps?kind=inference
  serve*turns?kind=server chunks*steps?kind=pipeline } wait_all
train: batch?takes_outside step!steps_of_micro{ pass*micro_batches read?reads_loss } log?decoy
  evaluate?evaluates?is_middle_step
pass: step?steps_of_micro{ batch!takes_outside batch?takes_outside!is_first_micro
  graph?graph=step{ closed?style=lightning open!style=lightning } }
closed: closure{ torch_step!is_nsys{ forward{ forward_pass loss_pass } zero backward{
  backward_pass } clip?clips -optimizer{ update*devices } } }
open: zero?zero_grad=first?is_first_micro forward{ graph?graph=parts{ gather?is_sharded!ranks=1
  forward_pass } read?reads_in_forward side?side_stream loss_pass!names_loss } loss?names_loss{
  loss_pass?names_loss } backward{ backward_pass } finish?is_last_micro
finish: hidden clip?clips optimizer?optimizer{ torch_step?optimizer=torch!is_nsys{
  update*devices?optimizer } } zero?zero_grad=last
batch: -data{ data?loader{ own_loader?loader=get_batch{ loader?loader!loader=get_batch!is_nsys{
  fetch!limit=data fetch_long?limit=data } } } prefetch?prefetches upload!prefetches }
prefetch: loading{ copy_ahead divide } wait_copies
forward_pass: compiled?compiled{ embed layer*layers move }
upload: pageable?is_pageable wait_copy?is_pageable pinned!is_pageable
layer: move Block_module?modules{ layer_body }
layer_body: LayerNorm_module?modules{ norm!compiled fused_norm?compiled } Linear_module?modules{
  linear } Attention_module?modules{ attend } gelu!compiled fused_gelu?compiled
loss_pass: softmax nll
backward_pass: autograd{ loss_node{ nll_back } layer_back*-layers move }
layer_back: move node!compiled{ compiled_node?compiled{ Block_module?modules?checkpoints{
  layer_body?checkpoints attend_back mm mm } } } exchange?is_last_micro!ranks=1
exchange: reduce!is_sharded scatter?is_sharded
update: wait_ranks!ranks=1 change change change
change: adam!optimizer=plain plain?optimizer=plain
zero: zero_grad{ torch_zero?optimizer=torch!is_nsys{ fill?fills } }
clip: -clip{ norm_grads scale_grads }
side: side_waits side_gelu wait_side
hidden: tokenize?hides=range{ collector?hides=collector{ autotune?hides=compiling{ hide?hides } }
  }
log: decoy{ add }
evaluate: -evaluation{ forward_pass forward_pass read }
read: download wait_copy
infer: step{ batch forward{ graph?graph{ forward_pass } } read?reads_loss }
serve: draw_turn -forward{ turn{ prepare graph?is_decode?graph{ forward_pass } } }
  ponder?limit=host ponder?limit=data
ponder: wait_event think
chunks: attn mlp mlp attn
attn: attn-F{ mm_forward mm_forward dispatch } attn-B{ mm mm dispatch } attn-W{ mm mm dispatch }
mlp: mlp-F{ mm_forward mm_forward combine } mlp-B{ mm mm combine } mlp-W{ mm mm combine }
"""
"""The acts of each rule: `name*count` repeats, `*-` backwards; `?` and `!` ask what the plan has or
has not. What is in braces happens anyway, within a range, graph or thread if that is asked for;
`-part` has no range.
"""
RULES = dict(re.findall(r"^(\w+): ((?:.|\n )*)", _GRAMMAR, re.M))
_COUNTERS = {"micro_batches": "micro", "layers": "layer", "devices": "device"}
_CHANGES: dict[str, dict[str, Any]] = {part: {"phase": part} for part in list(Part)[:9]}
_CHANGES["evaluation"]["step"] = -1
_CHANGES |= {"F": _CHANGES["forward"], "B": _CHANGES["backward"], "W": _CHANGES["weights"]}
_CHANGES |= {"autograd": {"thread": AUTOGRAD}, "loading": {"thread": LOADING}}
_CHANGES |= {"decoy": {"step": -1}, "graph": {"is_in_graph": True}}
"""What is otherwise for acts within each of these."""


class Act(NamedTuple):
    """One thing that the program does, and where in the program it stands."""

    verb: str
    """A method of `Machine`."""
    kind: str = ""
    name: str = ""
    means: str = ""
    operator: str = ""
    duration_ns: int = 0
    stream: int = COMPUTE
    of_device: int | None = None
    of_stream: int = COMPUTE
    """The stream whose work is waited for."""
    args: Mapping[str, Any] = {}
    label: str = ""
    """The kind, batch and tokens of a server's step."""
    phase: str = ""
    step: int = -1
    """The step of the optimizer or of the server; -1 outside of all."""
    micro: int = 0
    device: int = 0
    thread: int = MAIN
    is_in_graph: bool = False


def _open(kind: str, name: str = "", means: str = "") -> Act:
    return Act("open", kind, name, means)


def _pause(means: str, duration_ns: int) -> Act:
    return Act("pause", means=means, duration_ns=duration_ns)


def _kernel(name: str, operator: str = "", duration_ns: int = 0, stream: int = COMPUTE) -> Act:
    return Act("launch", "kernel", name, "", operator, duration_ns, stream)


def _copy(kind: str, operator: str = "aten::copy_", stream: int = COMPUTE) -> Act:
    return Act("launch", "copy", f"Memcpy {kind}", "", operator, 15 * MICROSECOND, stream)


_AT = "void at::native::"
_FOREACH = _AT + "(anonymous namespace)::multi_tensor_apply_kernel<{}<float, 4>>"
_PLAIN = _AT + "vectorized_elementwise_kernel<4, at::native::{}>"
MATMULS = ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "ampere_bf16_s16816gemm_bf16_128x128_tn")
ADAM = _FOREACH.format("at::native::(anonymous namespace)::FusedAdamMathFunctor")
_FILL, _ADD = _PLAIN.format("FillFunctor<float>"), _PLAIN.format("CUDAFunctor_add<float>")
_GELU = _PLAIN.format("GeluCUDAKernelImpl")
_FLASH = "void flash::flash_{0}_kernel<Flash_{0}_kernel_traits<64, 128, 128, 4>>"
_DEEP_EP = "void deep_ep::internode::{}<true, 8, 9>"
_NODE = "autograd::engine::evaluate_function: {}Backward0"
_LOADER = "enumerate(DataLoader)#{loader}DataLoaderIter.__next__"
ACTS = {
    "around": _open("range", "{around}"),
    "decoy": _open("range", "{decoy}"),
    "torch_step": _open("range", "Optimizer.step#AdamW.step", Part.OPTIMIZER),
    "torch_zero": _open("range", "Optimizer.zero_grad#AdamW.zero_grad", Part.ZERO_GRAD),
    "own_loader": _open("range", "get_batch", Pause.RANGE),
    "loader": _open("range", _LOADER, Part.DATA),
    "tokenize": _open("range", "tokenize and log", Pause.RANGE),
    "collector": _open("frame", "Python GC", Pause.COLLECTOR),
    "autotune": _open("operator", "CachingAutotuner.benchmark_all_configs"),
    "compiled": _open("operator", "Torch-Compiled Region: 0/0"),
    "loss_node": _open("operator", _NODE.format("NllLoss"), Part.BACKWARD),
    "node": _open("operator", _NODE.format("Addmm"), Part.BACKWARD),
    "compiled_node": _open("operator", _NODE.format("CompiledFunction"), Part.BACKWARD),
    "graph": _open("graph"),
    "autograd": _open("thread"),
    "loading": _open("thread", "beside"),
    "embed": _kernel(_ADD, "aten::embedding"),
    "norm": _kernel(_AT + "vectorized_layer_norm_kernel<float>", "aten::native_layer_norm"),
    "fused_norm": _kernel("triton_per_fused_add_native_layer_norm_{layer}"),
    "linear": _kernel(MATMULS[0], "aten::addmm"),
    "attend": _kernel(_FLASH.format("fwd"), "aten::_flash_attention_forward"),
    "gelu": _kernel(_GELU),
    "fused_gelu": _kernel("triton_poi_fused_add_native_layer_norm_{layer}"),
    "softmax": _kernel("void cunn_SoftMaxForward<4, float, float>", "aten::_log_softmax"),
    "nll": _kernel(_AT + "nll_loss_forward_reduce_cuda_kernel_2d<float>"),
    "nll_back": _kernel(_AT + "nll_loss_backward_reduce_cuda_kernel_2d<float>"),
    "attend_back": _kernel(_FLASH.format("bwd")),
    "mm": _kernel(MATMULS[1], "aten::mm"),
    "mm_forward": _kernel(MATMULS[0], "aten::mm"),
    "adam": _kernel(ADAM, "aten::_fused_adamw_"),
    "plain": _kernel(_ADD, "aten::add_"),
    "norm_grads": _kernel(_FOREACH.format("LpNormFunctor"), "aten::_foreach_norm"),
    "scale_grads": _kernel(_FOREACH.format("BinaryOpListAlphaFunctor"), "aten::_foreach_mul_"),
    "fill": _kernel(_FILL, "aten::zero_", 3 * MICROSECOND),
    "add": _kernel(_ADD, "aten::add_"),
    "side_gelu": _kernel(_GELU, stream=SIDE),
    "divide": _kernel(_FILL, "aten::div_", stream=COPIES),
    "dispatch": _kernel(_DEEP_EP.format("dispatch"), stream=COMMUNICATION),
    "combine": _kernel(_DEEP_EP.format("combine"), stream=COMMUNICATION),
    "download": _copy("DtoH (Device -> Pageable)"),
    "pageable": _copy("HtoD (Pageable -> Device)"),
    "pinned": _copy("HtoD (Pinned -> Device)"),
    "copy_ahead": _copy("HtoD (Pinned -> Device)", "", COPIES),
    "fetch": _pause(Pause.DATA, 20 * MICROSECOND),
    "fetch_long": _pause(Pause.DATA, 12 * MILLISECOND),
    "prepare": _pause(Pause.PREPARING, 30 * MICROSECOND),
    "think": _pause(Pause.PREPARING, 3 * MILLISECOND),
    "hide": _pause("{hides}", 4 * MILLISECOND),
    "wait_all": Act("wait", name="cudaDeviceSynchronize", stream=-1),
    "wait_event": Act("wait", name="cudaEventSynchronize", stream=-1),
    "wait_copy": Act("wait", name="cudaStreamSynchronize"),
    "wait_copies": Act("join", of_stream=COPIES),
    "wait_ranks": Act("join", of_stream=COMMUNICATION),
    "side_waits": Act("join", stream=SIDE),
    "wait_side": Act("join", of_stream=SIDE),
}
ACTS |= {
    f"{name}_module": _open("frame", f"nn.Module: {name}_{{layer}}")
    for name in ("Block", "LayerNorm", "Linear", "Attention")
}
COLLECTIVES = {
    "gather": ("all-gather", "_allgather_base", "AllGather", 1),
    "reduce": ("all-reduce", "allreduce", "AllReduce_Sum_bf16", 2),
    "scatter": ("reduce-scatter", "_reduce_scatter_base", "ReduceScatter_Sum_bf16", 2),
}
"""What each is called here, by `record_param_comms` and in its kernel; MB of messages differ."""
_NCCL = "ncclDevKernel_{}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Writer:
    """Writes the acts of a program."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.random = plan, random.Random(plan.seed)
        self.acts: list[Act] = []
        self.at = {name: Act._field_defaults[name] for name in Act._fields[-6:]}
        self.opened: list[tuple[bool, Act, dict[str, Any]]] = []
        self.facts: dict[str, Any] = {**vars(plan), "turns": 3 * plan.steps, "label": ""}
        self.facts |= {"takes_outside": plan.style in ("lightning", "iteration")}
        self.facts |= {"names_loss": Part.LOSS in STYLES[plan.style]}
        self.facts |= {"scale": 1, "layer": -1, "n": -1}
        self.numbers: Counter[int] = Counter()
        """How many operators of each thread had a sequence number."""
        self.nodes: dict[int, int] = {}
        """The sequence number of each layer's operator of forward."""
        self.write("program")

    def write(self, rule: str) -> None:
        for symbol in RULES[rule].split():
            name, count, asked = re.findall(r"^([-\w]+|})(?:\*(-?\w+))?(\S*?){?$", symbol)[0]
            is_asked = all(map(self.holds, re.findall(r"[?!][\w=]+", asked)))
            if name == "}":
                is_open, act, self.at = self.opened.pop()
                if is_open:
                    self.add(act._replace(verb="close"))
            elif symbol.endswith("{"):
                self.open(name, is_asked)
            elif is_asked and count:
                self.repeat(name, count)
            elif is_asked:
                self.act(name)

    def holds(self, condition: str) -> bool:
        name, _, value = condition[1:].partition("=")
        fact = self.facts[name]
        return (str(fact) == value if value else bool(fact)) == (condition[0] == "?")

    def repeat(self, rule: str, count: str) -> None:
        number, before = self.facts[count.strip("-")], self.at
        counter = _COUNTERS.get(count.strip("-"), "step")
        for index in range(number)[:: -1 if count[0] == "-" else 1]:
            self.facts |= {counter: index, f"is_first_{counter}": index == 0}
            self.facts |= {f"is_last_{counter}": index == number - 1}
            self.facts |= {f"is_middle_{counter}": index == number // 2}
            self.at = self.at | ({counter: index} if counter in self.at else {})
            self.act(rule)
        self.facts["layer"], self.at = -1, before

    def open(self, name: str, is_asked: bool) -> None:
        """Open what the name stands for, if that is asked for and the host does it itself."""
        before, act = self.at, ACTS.get(name) or self.region(name)
        is_open = is_asked and not before["is_in_graph"] and act.kind + act.name != "range"
        if is_asked:
            self.at = before | _CHANGES.get(name.split("-")[-1], {})
        if is_open:
            self.add(act)
        self.opened.append((is_open, act, before))

    def region(self, name: str) -> Act:
        """A part of the program, in a range if the style names such parts."""
        part, _, letter = name.partition("-")
        part = self.facts["turn"] if name == "turn" else part
        self.facts |= {"n": self.facts["n"] + (name == "step"), "letter": letter}
        means = _CHANGES.get(letter, {}).get("phase", part)
        text = STYLES[self.plan.style].get(part, "")
        return _open("range", text, means)._replace(label=self.facts["label"])

    def act(self, name: str) -> None:
        if name in RULES:
            self.write(name)
        elif name in COLLECTIVES:
            self.collective(name)
        elif name in ACTS:
            self.add(ACTS[name])
        else:
            getattr(self, name)()

    def add(self, act: Act) -> None:
        """Add the act as it stands here, within its operator if it has one."""
        act = self.numbered(act)._replace(**self.at)
        if act.verb == "launch" and self.plan.limit == "copies" and "HtoD" in act.name:
            act = act._replace(duration_ns=8 * MILLISECOND)
        elif act.verb == "launch" and not act.duration_ns:
            usual = self.facts["scale"] * (5 if self.plan.limit == "host" else 60) * MICROSECOND
            act = act._replace(duration_ns=int(usual * self.random.uniform(0.5, 1.5)))
        name, means = act.name.format_map(self.facts), act.means.format_map(self.facts)
        acts = [act._replace(name=name, means=means)]
        if act.operator and not act.is_in_graph:
            operator = act._replace(verb="open", kind="operator", name=act.operator)
            acts = [operator, *acts, operator._replace(verb="close")]
        self.acts += acts

    def numbered(self, act: Act) -> Act:
        """The act with the sequence number of an operator that makes a node of backward, or of that
        node; threads number theirs apart, so that a recomputation has the numbers of forward.
        """
        layer, thread = self.facts["layer"], self.at["thread"]
        if act.operator == "aten::addmm":
            number, of_forward = self.numbers[thread], 0
            self.numbers[thread] += 1
            if self.at["phase"] == Part.FORWARD:
                self.nodes[layer] = number
        elif act.name.startswith("autograd::"):
            number, of_forward = self.nodes.get(layer, -1), MAIN
        else:
            return act
        return act._replace(args={"Sequence number": number, "Fwd thread id": of_forward})

    def move(self) -> None:
        """Copy what was computed to the device of the layer, or to the first one outside of all
        layers; its work waits for that.
        """
        device = max(self.facts["layer"], 0) * self.plan.devices // self.plan.layers
        before = self.at["device"]
        if device != before:
            self.add(_copy(f"PtoP (Device {before} -> Device {device})", ""))
            self.at = self.at | {"device": device}
            self.add(Act("join", of_device=before))

    def collective(self, name: str) -> None:
        self.add(Act("join", stream=COMMUNICATION))
        _, of_torch, of_kernel, scale = COLLECTIVES[name]
        number = self.random.randrange(4, 12) * scale * 500_000
        args = {
            "Collective name": of_torch,
            "In msg nelems": number,
            "Out msg nelems": number,
            "Group size": self.plan.ranks,
            "dtype": "BFloat16",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": str([*range(self.plan.ranks)]),
        }
        act = _kernel(_NCCL.format(of_kernel), "record_param_comms", 10, COMMUNICATION)
        self.add(act._replace(args=args))

    def draw_turn(self) -> None:
        """Draw what a server does next: it fills the cache by launches, and decodes by a graph."""
        is_prefill, pick = self.random.random() < 0.3, self.random.choice
        batch = pick((1, 4, 8)) if is_prefill else pick((16, 32))
        tokens = batch * 1024 if is_prefill else batch
        turn = Part.PREFILL if is_prefill else Part.DECODE
        self.facts |= {"turn": turn, "is_decode": not is_prefill, "scale": 1 + 3 * is_prefill}
        self.facts |= {"batch": batch, "tokens": tokens, "label": f"{turn} {batch} {tokens}"}
        self.facts["decoding"] = pick((2, 8)) if is_prefill and self.plan.is_mixed else 0
