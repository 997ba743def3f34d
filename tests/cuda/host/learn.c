/* learn.c - learning on the mock device (host.h). */
#include <stdlib.h>

#include "../learn_reference.h"
#include "internal.h"

kvant_status host_learn(const kvant_cuda_learn_args *args, kvant_cuda_stream stream)
{
    ANSWER(learn, args, stream);
    if (!args->rows || !args->workspace || !args->triangles || !args->centers || !args->start ||
        (uintptr_t)args->workspace % 16 || args->workspace_bytes < kvant_cuda_learn_bytes(args))
        return KVANT_ERR_ARGUMENT;
    host_writes(stream, args->workspace);
    for (uint32_t i = 0; i * args->batch_tokens < args->n_tokens; i++)
        host_reads(stream, args->queries[i]);
    learn_reference(args);
    return KVANT_OK;
}
