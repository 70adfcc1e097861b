"""When each refusal that can come after processes started is said: {file: {function: (number, when, why)}}.

A reason (`why`) belongs to RUN only: what cannot be known before.
"""

from __future__ import annotations

PACKAGES = (*("train", "rollout", "sync", "agents", "checkpoint", "engine", "metrics", "rewards", "data", "cpu"),)

PLAN = "by the plan or the configuration's own rules, without a process"
FUNCTIONS = "by check_users_functions, which loads rewards, episodes, tools and sinks before the start"
TRIED = "by the trial, through this function (launcher/input_trial.py)"
VALUES = "headers by the trial, values by `plan --read-weights`, through this function"
START = "by the launcher, before it starts processes"
TOOL = "by a command or a tool that starts no run"
RUN = "in the run"
WHEN = (PLAN, FUNCTIONS, TRIED, VALUES, START, TOOL, RUN)

# Why something is known only in the run.
_SAMPLED = "it is about what was sampled or scored"
_NUMBERS = "it is about numbers that training computes"
_SERVERS = "it is about what running servers answer"
_PROCESSES = "it is about processes or a network that fail"
_DISK = "a disk or a file changes while the run goes on"
_DEFECT = "it would be a defect of ours: the plan and the tests exclude it"
_HERE = "only the machine of the rank or server knows: its GPU, and what is installed there; the doctor looks before"
_RESUME = "it compares with a checkpoint or a record that is read when the run goes on"

TABLE: dict[str, dict[str, tuple[int, str] | tuple[int, str, str]]] = {
    "train/critic_step.py": {"build_critic": (1, PLAN)},
    "train/scatter.py": {"Exchange._announce": (1, RUN, _PROCESSES), "Exchange._await": (1, RUN, _PROCESSES)},
    "train/fit_scores.py": {"ScoreFitting._packs": (1, RUN, "one example is longer than a pack; its tokens are new")},
    "train/hook_trial.py": {"try_objective": (2, TRIED), "try_source": (1, TRIED)},
    "train/rank0.py": {"Rank0.check_newest_attempt": (1, RUN, _PROCESSES)},
    "train/session.py": {"load_reference": (1, PLAN), "_check_skipped": (1, RUN, _NUMBERS)},
    "train/sft_loop.py": {"run_sft": (1, RUN, _NUMBERS), "_measure": (2, RUN, _SAMPLED)},
    "train/servers.py": {
        "SharedGpus._agree_on": (1, RUN, _SERVERS),
        "SharedGpus._stop_sampling": (1, RUN, _SERVERS),
        "SharedGpus._on_each_server": (1, RUN, _SERVERS),
    },
    "train/worker.py": {"RankEnvironment.read": (2, RUN, _PROCESSES), "_store_of_job": (1, RUN, _PROCESSES)},
    "train/batches.py": {
        "scored_batch": (1, RUN, _SAMPLED),
        "has_masks": (1, RUN, _SERVERS),
        "served_scores": (1, RUN, _RESUME),
    },
    "train/held_out.py": {
        "summarize": (1, RUN, _SAMPLED),
        "is_correct": (1, RUN, "whether a reward says `correct` is known when it has scored a response"),
        "LoadedSet.__init__": (1, TRIED),
    },
    "train/sources.py": {"LiveSource._check_fresh": (1, RUN, _SAMPLED), "RecordedSource._read": (1, RUN, _RESUME)},
    "data/chat.py": {
        "PromptEncoder.__init__": (2, TRIED),
        "PromptEncoder.end_token_id": (1, TRIED),
        "PromptEncoder._masked": (2, TRIED),
        "PromptEncoder._render": (1, TRIED),
        "PromptEncoder._encode_plain": (1, TRIED),
        "load_tokenizer": (3, TRIED),
        "check_vocabulary": (1, TRIED),
        "_template_of": (1, TRIED),
    },
    "data/templates.py": {
        "run_end_tokens": (1, TRIED),
        "check_taught_end": (1, TRIED),
        "SuffixRule.__init__": (1, TRIED),
        "SuffixRule.sampled_text": (3, TRIED),
        "SuffixRule._end_before_next": (1, RUN, _SAMPLED),
        "SuffixRule._text_after_marks": (1, RUN, _SAMPLED),
        "SuffixRule._end_of_turn": (1, TRIED),
        "SuffixRule._check_places": (1, RUN, _SAMPLED),
        "SuffixRule._ends_of_turns": (2, TRIED),
    },
    "data/packing.py": {
        "ExpertRoutes.of": (2, RUN, _SERVERS),
        "split_mini_batches": (1, RUN, _DEFECT),
        "_fitting_sizes": (2, RUN, _DEFECT),
    },
    "data/held_out_responses.py": {
        "write_responses_of": (1, RUN, _DISK),
        "drop_responses": (1, RUN, _DISK),
        "read_responses": (2, RUN, _DISK),
    },
    "data/rows.py": {
        "JsonlFile.__init__": (2, TRIED),
        "JsonlFile.__getitem__": (1, RUN, _DISK),
        "_lines": (1, TRIED),
        "check_first_rows": (2, PLAN),
        "_opened": (4, TRIED),
    },
    "data/procedural_rows.py": {
        "make_rows": (1, PLAN),
        "_Maker.__init__": (2, PLAN),
        "_Maker.rows": (1, PLAN),
        "_lines": (1, PLAN),
    },
    "data/prompts.py": {
        "taught_prompt.value": (1, TRIED),
        "RowSource.item": (1, TRIED),
        "RowSource._survey": (2, TRIED),
    },
    "data/chosen_rows.py": {
        "ChosenRows.next": (1, TRIED),
        "ChosenRows.load_state_dict": (1, RUN, _RESUME),
    },
    "data/stream.py": {
        "PromptStream.load_state_dict": (5, RUN, _RESUME),
        "PromptStream._draw": (
            1,
            RUN,
            "every row that is left is too long; rows beyond the survey are encoded when drawn",
        ),
    },
    "data/row_files.py": {
        "_refuse_other_forms": (3, PLAN),
        "TableFile.__init__": (2, TRIED),
        "TableFile.__getitem__": (1, RUN, _DISK),
        "check_first_table_rows": (2, PLAN),
        "_parts_of": (2, TRIED),
        "_saved_files": (2, TRIED),
        "_pyarrow": (1, TRIED),
        "_opened": (2, TRIED),
        "_check_columns": (1, TRIED),
    },
    "cpu/fake_device.py": {"load_device": (3, TOOL), "_built": (3, TOOL)},
    "cpu/fake_kernels.py": {"provide": (1, TOOL)},
    "data/template_process.py": {"ChatTemplate._render": (3, TRIED)},
    "agents/adapters/environment_loop.py": {"pattern_of": (2, FUNCTIONS), "as_text": (1, RUN, _SAMPLED)},
    "agents/adapters/gym_text.py": {"check_options": (1, FUNCTIONS), "_act": (1, RUN, _SAMPLED)},
    "agents/adapters/openenv.py": {
        "check_options": (2, FUNCTIONS),
        "_Socket._ask": (1, RUN, _SAMPLED),
        "_Requests._check_state": (2, RUN, _SAMPLED),
        "read_body": (1, RUN, _SAMPLED),
        "_step": (2, RUN, _SAMPLED),
        "_parsed": (1, RUN, _SAMPLED),
    },
    "agents/tools.py": {
        "type_of": (1, FUNCTIONS),
        "_literal": (1, FUNCTIONS),
        "load_tools": (1, FUNCTIONS),
        "load_tool": (9, FUNCTIONS),
    },
    "agents/demonstrated.py": {"DemonstrationEncoder._check_calls": (1, TRIED), "_answered": (1, TRIED)},
    "agents/endpoint.py": {
        "AgentEndpoint.start": (1, RUN, "whether an address can be bound is known when it is bound")
    },
    "agents/pool.py": {"EpisodePool._replace": (1, RUN, _PROCESSES)},
    "agents/session.py": {"EpisodeSession._sample": (1, RUN, _SAMPLED)},
    "agents/external_agent.py": {"ForeignAgents.start": (1, FUNCTIONS)},
    "agents/loop_watch.py": {"_OwnedTask.cancel": (1, RUN, _SAMPLED)},
    "agents/messages.py": {"_only_argument": (2, TRIED), "_format_shown": (1, TRIED)},
    "agents/protocol.py": {"load_episode": (4, FUNCTIONS)},
    "agents/recorder.py": {"Recorder.locate": (1, RUN, _SAMPLED)},
    "agents/episode_worker.py": {"WorkerEpisode.turn": (1, RUN, _SAMPLED), "WorkerTools.call": (1, RUN, _SAMPLED)},
    "rollout/pooled_server.py": {
        "LoopThread.check": (1, RUN, _PROCESSES),
        "PooledServer.control.run": (2, RUN, _SERVERS),
    },
    "rollout/registration.py": {"read_registrations": (1, RUN, _DISK), "read_secret": (3, RUN, _DISK)},
    "rollout/groups.py": {"SampledGroups.check_failures": (1, RUN, _SAMPLED)},
    "rollout/sampler.py": {"Sampler.sample": (1, RUN, _SERVERS), "Sampler._complete": (1, RUN, _SERVERS)},
    "rollout/server/start_weights.py": {
        "CopyWait.look": (1, RUN, _DISK),
        "CopyWait._maker_progress": (2, RUN, _DISK),
        "current_weights": (1, RUN, _DISK),
    },
    "rollout/server/process.py": {
        "free_port": (3, RUN, "which addresses and ports a server's machine has is known there, when it starts")
    },
    "rollout/teacher_server.py": {
        "TeacherServer.__init__": (1, TRIED),
        "_variable": (1, TRIED),
        "first_look": (1, TRIED),
        "TeacherServers._check": (1, RUN, "the trial says it only if the server is up before the run"),
        "TeacherServers._until_answered": (2, RUN, _SERVERS),
    },
    "rollout/server/reward_server.py": {"own_model": (1, RUN, _DEFECT)},
    "rollout/server/spec.py": {
        "served_precision": (1, RUN, _SERVERS),
        "_server_info": (2, RUN, _SERVERS),
        "spec_from_config": (1, PLAN),
        "check_gpu": (1, RUN, _HERE),
        "check_batch_invariant": (1, PLAN),
        "check_memory_saver": (2, RUN, _HERE),
        "check_options_ours": (1, PLAN),
        "check_options_sglang": (1, TRIED),
        "check_checkpoint": (2, RUN, _DEFECT),
    },
    "rollout/server/entry.py": {
        "read_model_config": (1, PLAN),
        "import_only": (2, START),
        "check_context": (1, PLAN),
    },
    "rollout/server/supervise.py": {
        "ServerSupervisor._serve": (2, RUN, _SERVERS),
        "ServerSupervisor._death_of": (1, RUN, _SERVERS),
        "ServerSupervisor._forget": (3, RUN, _SERVERS),
    },
    "rollout/server/next_attempt.py": {"_Caller.call": (1, RUN, _SERVERS), "_Caller.try_to": (2, RUN, _SERVERS)},
    "rollout/pool.py": {
        "ServerPool.__init__": (1, RUN, _DISK),
        "ServerPool.wait_ready": (1, RUN, _SERVERS),
        "ServerPool.acquire": (1, RUN, _SERVERS),
        "ServerPool._raise_if_all_failed": (1, RUN, _SERVERS),
    },
    "rollout/eval_servers.py": {"EvalServers.load": (1, RUN, _SERVERS), "EvalServers.acquire": (1, RUN, _SERVERS)},
    "engine/model.py": {"_mark": (2, RUN, _DEFECT)},
    "cpu/te_loading.py": {"load_transformer_engine": (1, RUN, _HERE)},
    "models/parameter_names.py": {"canonical_parameters": (3, RUN, _DEFECT)},
    "engine/precision.py": {
        "fusion_choices": (1, RUN, _HERE),
        "dispatcher_settings": (2, RUN, _HERE),
        "require_precision": (2, RUN, _HERE),
        "_require_block_scales": (2, RUN, _HERE),
    },
    "engine/optimizer.py": {"require_optimizer": (1, RUN, _HERE)},
    "engine/routing.py": {"RoutingPass.finish": (3, RUN, _NUMBERS)},
    "checkpoint/adapters.py": {
        "shares_a": (1, RUN, _RESUME),
        "from_peft": (1, RUN, _RESUME),
        "read_adapters": (4, RUN, _RESUME),
    },
    "sync/adapters.py": {
        "AdapterTransaction._prove_server": (1, RUN, _SERVERS),
        "write_random_adapters": (1, RUN, _DISK),
    },
    "checkpoint/hf_folder.py": {
        "read_scales": (2, VALUES),
        "HuggingFaceFolder.__init__": (1, TRIED),
        "HuggingFaceFolder._file": (1, TRIED),
        "HuggingFaceFolder._slice": (1, TRIED),
        "_weight_map": (2, TRIED),
        "StackedFolder._expert": (1, VALUES),
    },
    "sync/broadcast.py": {
        "_deliver_to_server": (2, RUN, _SERVERS),
        "ServerGroup.__init__": (1, RUN, _SERVERS),
        "ServerGroup.broadcast": (1, RUN, _SERVERS),
    },
    "checkpoint/mtp_layers.py": {"CarriedLayers.__init__": (1, TRIED)},
    "checkpoint/critic.py": {"import_critic.wanted": (1, RUN, "the bias of a critic's head is a value in its file")},
    "checkpoint/hf_import.py": {
        "check_folder": (1, VALUES),
        "_fill_from_tensor": (1, RUN, "a tied head that differs from the embedding is seen in the values of both"),
    },
    "checkpoint/gather.py": {"PolicyTensors.__init__": (2, RUN, _DEFECT)},
    "checkpoint/shard_check.py": {"ShardCheck.finish": (1, RUN, _DEFECT)},
    "checkpoint/hf_export.py": {"_Writer._write": (1, RUN, _DISK)},
    "sync/broadcast_group.py": {
        "PendingBroadcast.wait": (3, RUN, _SERVERS),
        "BroadcastGroup.broadcast": (1, RUN, _SERVERS),
        "OwnTensors.broadcast": (1, RUN, _SERVERS),
    },
    "sync/delta.py": {
        "Change.put_into": (1, RUN, _SERVERS),
        "read_record": (5, RUN, _SERVERS),
        "read_message": (1, RUN, _SERVERS),
        "read_changes": (1, RUN, _DISK),
        "read_changes.records": (2, RUN, _DISK),
    },
    "rollout/server/held_weights.py": {
        "HeldWeights._begin": (1, RUN, _SERVERS),
        "HeldWeights._start": (1, RUN, _SERVERS),
        "HeldWeights._change": (2, RUN, _SERVERS),
        "HeldWeights._apply": (1, RUN, _SERVERS),
        "HeldWeights._place": (1, RUN, _SERVERS),
        "HeldWeights.read_folder": (1, RUN, _DISK),
        "HeldWeights._read_changes": (1, RUN, _DISK),
    },
    "sync/versions.py": {
        "PublishedVersions.current": (1, RUN, _DISK),
        "PublishedVersions.commit": (2, RUN, _DISK),
        "PublishedVersions.prune": (1, RUN, _DISK),
    },
    "sync/publish.py": {
        "Publisher._publish": (1, RUN, _SERVERS),
        "Publisher.publish_again": (1, RUN, _SERVERS),
        "Publisher._lead_or_follow": (1, RUN, _SERVERS),
        "Publisher._lead.send": (1, RUN, _DEFECT),
    },
    "checkpoint/quantized.py": {"PublishedForm.tensors": (2, RUN, _NUMBERS)},
    "sync/servers.py": {
        "Deadline.left": (1, RUN, _SERVERS),
        "loaded_versions_of": (1, START),
        "check_same_versions": (1, START),
    },
    "rewards/fitting.py": {
        "token_ids": (1, RUN, "an example without a token is seen when it is encoded"),
        "fit": (1, TOOL),
    },
    "rewards/functions.py": {"load_function": (1, FUNCTIONS), "_check_call": (5, FUNCTIONS)},
    "rewards/json_responses.py": {"check_json_schema": (2, FUNCTIONS), "_validator": (4, FUNCTIONS)},
    "rewards/services.py": {"check_judge": (2, FUNCTIONS)},
    "rewards/latex.py": {"package": (1, FUNCTIONS)},
    "rewards/builtin.py": {
        "compiled": (2, FUNCTIONS),
        "check_regex": (3, FUNCTIONS),
        "Scorer.__init__": (2, FUNCTIONS),
        "check_format": (2, FUNCTIONS),
        "check_length": (2, FUNCTIONS),
    },
    "rewards/code.py": {"check_code": (4, FUNCTIONS), "_server": (2, FUNCTIONS)},
    "rewards/remote.py": {"RemoteCalls.__init__": (2, FUNCTIONS), "_variable": (1, FUNCTIONS)},
    "rewards/pool.py": {"ScoringPool._call": (1, RUN, _PROCESSES)},
    "rewards/weighted_sum.py": {"table_of": (1, FUNCTIONS), "_condition": (1, FUNCTIONS)},
    "checkpoint/compare.py": {"_run_lines": (1, TOOL)},
    "checkpoint/convert.py": {"_fused": (1, TOOL), "_convert": (4, TOOL), "_resume": (2, TOOL)},
    "checkpoint/folders.py": {"candidates": (1, RUN, _RESUME), "read_record": (1, RUN, _RESUME)},
    "checkpoint/served_folders.py": {
        "to_blocks": (2, TOOL),
        "to_form": (1, TOOL),
        "_Finite.read": (1, TOOL),
        "CopyMaker.look": (1, RUN, _DISK),
    },
    "checkpoint/safe_pickle.py": {"read_index": (2, RUN, _RESUME), "_check_format": (2, RUN, _RESUME)},
    "checkpoint/tensor_sources.py": {
        "SafetensorsFile.__init__": (4, TOOL),
        "SafetensorsFile._placed": (5, TOOL),
        "SafetensorsFile.read": (1, TOOL),
        "write_safetensors": (1, TOOL),
        "open_checkpoint": (2, TOOL),
        "HuggingFaceSource.__init__": (2, TOOL),
        "MegatronSource.__init__": (2, TOOL),
    },
    "checkpoint/save.py": {"Saver._waiting_inside": (1, RUN, _DISK)},
    "checkpoint/torch_dist.py": {
        "stored_place": (1, RUN, "a conversion reads the model's shape when it begins"),
        "write_index": (1, RUN, _DISK),
        "TorchDistFolder.__init__": (1, RUN, _RESUME),
        "TorchDistFolder._stored": (1, RUN, _RESUME),
        "TorchDistFolder.read": (1, RUN, _RESUME),
        "TorchDistFolder._load": (3, RUN, _RESUME),
    },
    "checkpoint/load.py": {"find_checkpoint": (1, RUN, _RESUME), "load_checkpoint": (3, RUN, _RESUME)},
    "data/journal/episode_log.py": {"EpisodeLog._open": (1, RUN, _DISK)},
    "data/journal/frames.py": {"FrameFile.frames": (2, RUN, _RESUME)},
    "data/journal/journal.py": {"_missing_groups": (1, RUN, _RESUME)},
    "data/journal/steps.py": {
        "well_formed": (1, RUN, _RESUME),
        "_read_file": (3, RUN, _RESUME),
        "_damage": (1, RUN, _RESUME),
        "StepWriter._refusal": (1, RUN, _DISK),
        "disk_errors": (1, RUN, _DISK),
        "write_token_gaps": (1, RUN, _DISK),
    },
    "metrics/sink_loading.py": {"sink_makers": (1, FUNCTIONS), "_check": (2, FUNCTIONS), "load_sink": (4, FUNCTIONS)},
    "metrics/writer.py": {
        "MetricsWriter._folder_errors": (1, RUN, _DISK),
        "MetricsWriter._step_of": (1, RUN, _RESUME),
        "read_metrics": (1, TOOL),
    },
}
