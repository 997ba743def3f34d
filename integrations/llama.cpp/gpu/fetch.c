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

bool kvp_gpu_copy(kvp_gpu_backend *b, struct kvp_gpu_fetched *memory, const abi_tensor *from, abi_tensor *to)
{
    const size_t bytes = kvp_api.nbytes(from);

    if (!have_memory(memory, bytes))
        return false;
    *to = *from;
    to->data = memory->at;
    return kvp_cu_ok(kvp_cu.copy_out(to->data, (cu_address)(uintptr_t)from->data, bytes, b->gpu->stream), "copying");
}

bool kvp_gpu_copy_rows(kvp_gpu_backend *b, struct kvp_gpu_fetched *memory, const abi_tensor *from, size_t step, abi_tensor *to)
{
    cu_copy_2d copy = { .from_type = CU_MEMORY_DEVICE,
                        .from_device = (cu_address)(uintptr_t)from->data,
                        .from_pitch = step * from->nb[1],
                        .to_type = CU_MEMORY_HOST,
                        .to_pitch = from->nb[1],
                        .width = from->nb[1],
                        .height = (size_t)from->ne[1] };

    if (!have_memory(memory, copy.width * copy.height))
        return false;
    *to = *from;
    to->data = copy.to_host = memory->at;
    return kvp_cu_ok(kvp_cu.copy_2d(&copy, b->gpu->stream), "copying");
}

bool kvp_gpu_fetch(kvp_gpu_backend *b, kvp_fetched place, const abi_tensor *from, abi_tensor *to)
{
    return kvp_gpu_copy(b, &b->fetched[place], from, to) && kvp_cu_ok(kvp_cu.stream_finish(b->gpu->stream), "copying");
}

struct kvp_gpu_copies *kvp_gpu_copies_of(kvp_gpu_backend *b)
{
    struct kvp_gpu_copies *copies;

    if (!b->copies_taken)
        b->n_copies = (b->n_copies + 1) % KVP_COPIES;
    copies = &b->copies[b->n_copies];
    if (copies->copied == NULL) {
        if (!kvp_cu_ok(kvp_cu.event_new(&copies->copied, CU_NO_TIMING | CU_EVENT_SLEEPS), "an event"))
            return NULL;
        sem_init(&copies->free, 0, 1);
    }
    while (!b->copies_taken && sem_wait(&copies->free) != 0)
        ;
    b->copies_taken = true;
    return copies;
}

void kvp_gpu_fetch_release(kvp_gpu_backend *b)
{
    for (int i = 0; i < KVP_COPIES; i++) {
        struct kvp_gpu_copies *copies = &b->copies[i];
        if (copies->copied == NULL)
            continue;
        while ((i != b->n_copies || !b->copies_taken) && sem_wait(&copies->free) != 0)
            ;
        kvp_cu.event_free(copies->copied);
        sem_destroy(&copies->free);
        if (copies->keys.at != NULL)
            kvp_cu.host_memory_free(copies->keys.at);
        if (copies->queries.at != NULL)
            kvp_cu.host_memory_free(copies->queries.at);
    }
    for (int place = 0; place < KVP_FETCHED_PLACES; place++)
        if (b->fetched[place].at != NULL)
            kvp_cu.host_memory_free(b->fetched[place].at);
}
