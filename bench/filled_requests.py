"""vLLM's DecodeBenchConnector for some of the requests. It fills the contexts of requests whose
names begin with "filled". All other requests compute their prompts. vLLM imports this module by its
name."""

from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector


class DecodeBenchConnector(decode_bench_connector.DecodeBenchConnector):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if not request.request_id.startswith("filled"):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
