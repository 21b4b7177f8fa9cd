"""Rows of the metric catalogue: NICs, TCP, InfiniBand and RoCE; disks, file systems and I/O stalls; engines."""

from rolecall.core.metrics.metric import NODE, RANK, MetricScope, rows

NETWORK_METRICS = rows(
    MetricScope.NETWORK,
    NODE,
    {
        "nic_up{interface}": "1 while the interface is up and has a carrier",
        "nic_speed_bytes_per_second{interface}": "Negotiated link speed; absent while the link is down",
        "nic_downs_total{interface}": "Times that the link went down since the agent started",
        "nic_carrier_changes_total{interface}": "Changes of the carrier state",
        "nic_received_bytes_total{interface}": "Bytes received",
        "nic_sent_bytes_total{interface}": "Bytes sent",
        "nic_received_packets_total{interface}": "Packets received",
        "nic_sent_packets_total{interface}": "Packets sent",
        "nic_errors_total{interface,error}": "Packets lost or damaged, and faults of the link, by the driver's name "
        "for it; absent until there was one",
        "nic_pauses_received_total{interface,priority}": "Pause frames received, by priority (PFC; link: of the "
        "whole link): the peer could take no more",
        "nic_pauses_sent_total{interface,priority}": "Pause frames sent, by priority (PFC; link: of the whole link): "
        "this node could take no more",
        "nic_paused_seconds_total{interface,priority}": "Time in which sending was stopped by received pause frames, "
        "by priority",
        "tcp_segments_sent_total": "TCP segments sent",
        "tcp_retransmits_total": "TCP segments sent again",
        "tcp_timeouts_total": "Retransmission timers of TCP that ran out",
        "tcp_syn_retransmits_total": "First segments of a TCP connection sent again",
        "tcp_listen_drops_total": "TCP connections dropped because a listener was full",
        "infiniband_up{nic,port}": "1 while the port is active; 0: not, or its NIC is gone",
        "infiniband_physical_state{nic,port,state}": "1 for the physical state that the port is in",
        "infiniband_rate_bytes_per_second{nic,port}": "Negotiated rate of the port",
        "infiniband_downs_total{nic,port}": "Times that the port went down since the agent started",
        "infiniband_received_bytes_total{nic,port}": "Bytes received, RDMA included",
        "infiniband_sent_bytes_total{nic,port}": "Bytes sent, RDMA included",
        "infiniband_events_total{nic,port,name}": "Every other counter of the port (counters and hw_counters), by "
        "the driver's name for it: those that indicate a fault always, others once they have counted",
        "infiniband_saturated{nic,port}": "Counters of the port that are saturated and stop counting until they are "
        "cleared",
    },
)
STORAGE_METRICS = rows(
    MetricScope.STORAGE,
    NODE,
    {
        "disk_reads_total{device}": "Reads finished",
        "disk_writes_total{device}": "Writes finished",
        "disk_read_bytes_total{device}": "Bytes read",
        "disk_written_bytes_total{device}": "Bytes written",
        "disk_read_seconds_total{device}": "Time that reads took, summed over reads",
        "disk_write_seconds_total{device}": "Time that writes took, summed over writes",
        "disk_busy_seconds_total{device}": "Time in which the disk was busy",
        "disk_requests_active{device}": "Reads and writes in progress",
        "filesystem_up{mount}": "1 if the file system answers, 0 if it fails or hangs",
        "filesystem_size_bytes{mount}": "Size of the file system",
        "filesystem_available_bytes{mount}": "Space available to unprivileged users",
        "filesystem_files{mount}": "Files that the file system can hold; absent where there is no limit",
        "filesystem_files_free{mount}": "Files that can still be made; absent where there is no limit",
        "filesystem_readonly{mount}": "1 if nothing can be written to it",
        "host_io_stall_seconds_total": "Time in which some task waited for a disk (PSI); absent where the kernel has "
        "none",
        "host_full_stall_seconds_total{resource}": "Time in which all tasks that had work waited for the resource at "
        "once (PSI): cpu, memory or io",
    },
)
VLLM, SGLANG = "vllm", "sglang"
"""Values of `server`."""
ENGINE_METRICS = rows(
    MetricScope.ENGINE,
    RANK,
    {
        "engine_up": "1 if the engine's metrics could be read in the newest poll, 0 if not",
        "engine_info{server}": "1, with the kind of server: vllm or sglang; absent while its metrics cannot be read",
        "engine_awake": "vLLM: 0 while the engine sleeps (its weights or KV cache are given up), 1 while it does not",
        "engine_requests_running": "Requests that the engine is processing; of SGLang as of its last log",
        "engine_requests_waiting": "Requests waiting in the engine's queue; of SGLang as of its last log",
        "engine_requests_finished_total{reason}": "vLLM: requests finished, by reason: stop, length, abort, error, "
        "repetition, other",
        "engine_kv_cache_used_ratio": "Share of the KV cache that is in use",
        "engine_preemptions_total": "Requests preempted to free KV cache, which are recomputed",
        "engine_prompt_tokens_total": "Prompt tokens processed; of SGLang counted once their request ends",
        "engine_generated_tokens_total": "Tokens generated",
        "engine_prefix_cache_queries_total": "vLLM: prompt tokens looked up in the prefix cache",
        "engine_prefix_cache_hits_total": "Of these, tokens found",
        "engine_first_token_seconds_total": "Time from a request's arrival to its first token, summed",
        "engine_first_tokens_total": "Requests in that sum",
        "engine_token_gap_seconds_total": "Time between a token and the next of the same request, summed",
        "engine_token_gaps_total": "Gaps in that sum",
        "engine_queue_seconds_total": "Time that requests waited before the engine took them, summed",
        "engine_queue_waits_total": "Requests in that sum",
    },
)
"""Of an engine with several cores (data parallel) or models the sum; of the KV cache the fullest. Times are sums, each
with the number of its events: the ratio of their increases is the mean over any window."""
