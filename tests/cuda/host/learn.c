/* learn.c - learning on the mock device (host.h). */
#include <stdlib.h>

#include "../../../src/base/half.h"
#include "../learn_reference.h"
#include "internal.h"
#include "learn/call.h"

static bool is_whole(const kvant_cuda_learn_args *args, const kvant_cuda_learn_layer *layer)
{
    for (uint32_t i = 0; i * args->batch_tokens < args->n_tokens; i++)
        if (!layer->queries[i])
            return false;
    return layer->rows && layer->triangles && layer->centers && layer->start;
}

kvant_status host_learn(const kvant_cuda_learn_args *args, kvant_cuda_stream stream)
{
    ANSWER(learn, args, stream);
    if (!args->workspace || (args->n_layers > 0 && !args->layers) ||
        (uintptr_t)args->workspace % 16 || args->workspace_bytes < kvant_cuda_learn_bytes(args))
        return KVANT_ERR_ARGUMENT;
    const learn_call call = learn_call_of(args);
    host_writes(stream, args->workspace);
    for (uint32_t layer = 0; layer == 0 || layer < args->n_layers; layer++) {
        const kvant_cuda_learn_layer *const at =
            learn_layer_of(&call, layer * kvant_learn_subs(args));
        if (!is_whole(args, at))
            return KVANT_ERR_ARGUMENT;
        for (uint32_t i = 0; i * args->batch_tokens < args->n_tokens; i++)
            host_reads(stream, at->queries[i]);
        host_reads(stream, at->rows);
    }
    learn_reference(args);
    return KVANT_OK;
}
