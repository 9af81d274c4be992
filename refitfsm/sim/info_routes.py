"""The calls that ask: health, readiness, model, server and load."""

from refitfsm.sim.engine import Engine, Status
from refitfsm.sim.wire import HttpReply, HttpRequest, empty_reply, json_reply, retired, text_reply


async def health(engine: Engine, request: HttpRequest) -> HttpReply:  # noqa: ARG001
    """/health and /health_generate: a token is generated for it."""
    return empty_reply(200 if await engine.healthy() else 503)


async def ready(engine: Engine, request: HttpRequest) -> HttpReply:  # noqa: ARG001
    """/ready: whether new requests would be taken; nothing is generated."""
    return empty_reply(200 if engine.status is Status.UP and not engine.gate.paused else 503)


async def model_info(engine: Engine, request: HttpRequest) -> HttpReply:  # noqa: ARG001
    """/model_info: the front end's word, without asking the scheduler."""
    info: dict[str, object] = {
        "model_path": engine.model_path,
        "tokenizer_path": engine.config.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": engine.truth.version_front,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama" if engine.config.reads_back else "qwen3",
        "architectures": ["LlamaForCausalLM" if engine.config.reads_back else "Qwen3ForCausalLM"],
    }
    if engine.profile.identity_in_model_info:
        info["served_model_name"] = engine.served_model_name
        info["load_format"] = "auto"
        info["reasoning_parser"] = None
        info["tool_call_parser"] = None
    if engine.profile.has_frontend_field:
        info["disaggregation_mode"] = "null"
    return json_reply(info)


async def server_info(engine: Engine, request: HttpRequest) -> HttpReply:  # noqa: ARG001
    """/server_info: launch arguments and the scheduler's figures; waits for the scheduler."""
    config = engine.config
    await engine.scheduler.control("server_info", config.timings.control_s, lambda: None)
    info: dict[str, object] = {
        "model_path": config.model_path if engine.profile.identity_in_model_info else engine.model_path,
        "served_model_name": config.served_model_name or config.model_path,
        "tp_size": config.tp_size,
        "dp_size": 1,
        "pp_size": 1,
        "device": config.device,
        "enable_memory_saver": config.memory_saver,
        "enable_weights_cpu_backup": config.weights_cpu_backup,
        "skip_tokenizer_init": config.skip_tokenizer_init,
        "weight_version": config.weight_version
        if engine.profile.identity_in_model_info
        else engine.truth.version_front,
        "status": "ready",
        "max_total_num_tokens": config.max_total_num_tokens,
        "max_req_input_len": config.context_length - 6,
        "context_length": config.context_length,
        "internal_states": [_internal_state(engine)],
        "version": engine.profile.version,
    }
    if engine.profile.has_frontend_field:
        info["frontend"] = "python"
    return json_reply({**info, **config.launch_options})


def _internal_state(engine: Engine) -> dict[str, object]:
    """What was measured at load time: it says nothing about what is released since."""
    config = engine.config
    return {
        "last_gen_throughput": 0.0,
        "memory_usage": {
            "weight": round(config.rank_weights_bytes() / 2**30, 2),
            "kvcache": round(config.kv_cache_bytes / 2**30, 2),
            "token_capacity": config.max_total_num_tokens,
            "graph": round(config.cuda_graph_bytes / 2**30, 2),
        },
    }


async def loads(engine: Engine, request: HttpRequest) -> HttpReply:
    """/v1/loads: a snapshot that is there even while the scheduler is busy."""
    load = _load(engine)
    if request.query.get("format") == "prometheus":
        numbers = [(key, value) for key, value in load.items() if key != "dp_rank"]
        lines = [
            f'# TYPE sglang_{key} gauge\nsglang_{key}{{dp_rank="0"}} {value}\n' for key, value in numbers
        ]
        return text_reply("".join(lines))
    # No wall clock in a simulation: the time is the loop's, written as SGLang writes it.
    head: dict[str, object] = {"timestamp": "1970-01-01T00:00:00+00:00", "version": engine.profile.version}
    if engine.profile.loads_have_accelerator:
        head.update(accelerator="simulated", num_accelerators=engine.config.tp_size)
    elif not engine.profile.checker_takes_get:
        head.update(dp_rank_count=1, aggregate={"total_reqs": _total(engine)})
    return json_reply({**head, "loads": [load]})


async def get_load(engine: Engine, request: HttpRequest) -> HttpReply:  # noqa: ARG001
    """/get_load: the older form of the same."""
    load = _load(engine)
    return json_reply(
        [
            {
                "dp_rank": 0,
                "num_reqs": _total(engine),
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_used_tokens"],
                "num_pending_tokens": 0,
            }
        ]
    )


def _load(engine: Engine) -> dict[str, int | float]:
    truth = engine.truth
    used = sum(span.length for request in truth.running.values() for span in request.kv)
    total = engine.config.max_total_num_tokens
    return {
        "dp_rank": 0,
        "num_running_reqs": len(truth.running),
        "num_waiting_reqs": len(truth.waiting),
        "num_used_tokens": used,
        "max_total_num_tokens": total,
        "token_usage": round(used / total, 4) if total else 0.0,
    }


def _total(engine: Engine) -> int:
    return len(engine.truth.running) + len(engine.truth.waiting)


async def retired_version(engine: Engine, request: HttpRequest) -> HttpReply:  # noqa: ARG001
    """/get_weight_version: kept by some releases only to say that it is gone."""
    return retired("Endpoint '/get_weight_version' is retired: '/model_info' has the version.")
