/* gather.c - prompts on their way to what learns a calibration for the next run (../gather.h): rows and queries of long batches, which
 * are in no captured graph, are copied to the computer's memory until there are enough. */
#include "gpu.h"

#include <stdlib.h>

#include "../buffer.h"
#include "../gather.h"
#include "../ggml_api.h"

bool kvp_gpu_fetch(kvp_gpu_backend *b, const abi_tensor *from, abi_tensor *to)
{
    const size_t bytes = kvp_api.nbytes(from);

    *to = *from;
    to->data = malloc(bytes);
    return to->data != NULL &&
           kvp_cu_ok(kvp_cu.copy_out(to->data, (cu_address)(uintptr_t)from->data, bytes, b->stream), "copying") &&
           kvp_cu_ok(kvp_cu.stream_finish(b->stream), "copying");
}

void kvp_gpu_gather_rows(kvp_gpu_backend *b, const abi_tensor *keys, const abi_tensor *values)
{
    const abi_tensor *nodes[2] = { keys, values };
    const size_t n = (size_t)keys->src[0]->ne[1];
    kvp_gather *gather = kvp_kv_gather(kvp_kv_of(keys));
    const bool wants = kvp_gather_wants(gather, n);
    kvp_rows rows[2];
    abi_tensor copies[2] = { 0 };
    bool ok = gather != NULL;

    for (int i = 0; i < 2 && ok; i++) {
        ok = !wants || kvp_gpu_fetch(b, nodes[i]->src[0], &copies[i]);
        rows[i] = (kvp_rows){ kvp_kv_of(nodes[i]), copies[i].data, nodes[i]->src[0]->nb[1] / sizeof(float) };
    }
    if (ok)
        kvp_gather_rows(gather, &rows[0], &rows[1], n);
    free(copies[0].data);
    free(copies[1].data);
}

void kvp_gpu_gather_queries(kvp_gpu_backend *b, const abi_tensor *node)
{
    const kvp_kv *keys = kvp_kv_of(node->src[1]);
    kvp_gather *gather = kvp_kv_gather(keys);
    abi_tensor copy = { 0 };

    if (kvp_gather_wants(gather, (size_t)(node->src[0]->ne[1] * node->src[0]->ne[3])) && kvp_gpu_fetch(b, node->src[0], &copy))
        kvp_gather_queries(gather, keys, &copy);
    free(copy.data);
}
