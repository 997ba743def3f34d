/* fetch.c - copies of rows, queries and positions in the computer's memory, for what is learnt there. */
#include "gpu.h"

#include "../ggml_api.h"

static bool have_memory(struct kvp_gpu_fetched *fetched, size_t bytes)
{
    void *memory = NULL;

    if (bytes <= fetched->bytes)
        return true;
    if (!kvp_cu_ok(kvp_cu.host_memory_new(&memory, bytes, CU_HOST_PORTABLE_MAPPED), "memory"))
        return false;
    if (fetched->at != NULL)
        kvp_cu.host_memory_free(fetched->at);
    *fetched = (struct kvp_gpu_fetched){ memory, bytes };
    return true;
}

bool kvp_gpu_fetch(kvp_gpu_backend *b, kvp_fetched place, const abi_tensor *from, abi_tensor *to)
{
    const size_t bytes = kvp_api.nbytes(from);

    if (!have_memory(&b->fetched[place], bytes))
        return false;
    *to = *from;
    to->data = b->fetched[place].at;
    return kvp_cu_ok(kvp_cu.copy_out(to->data, (cu_address)(uintptr_t)from->data, bytes, b->gpu->stream), "copying") &&
           kvp_cu_ok(kvp_cu.stream_finish(b->gpu->stream), "copying");
}
