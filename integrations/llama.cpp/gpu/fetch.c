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
    struct kvp_gpu_fetched *memory = &b->fetched[place];
    const size_t bytes = kvp_api.nbytes(from);

    if (!have_memory(memory, bytes))
        return false;
    *to = *from;
    to->data = memory->at;
    return kvp_cu_ok(kvp_cu.copy_out(to->data, (cu_address)(uintptr_t)from->data, bytes, b->gpu->stream), "copying") &&
           kvp_cu_ok(kvp_cu.stream_finish(b->gpu->stream), "copying");
}

void kvp_gpu_fetch_release(kvp_gpu_backend *b)
{
    for (int place = 0; place < KVP_FETCHED_PLACES; place++)
        if (b->fetched[place].at != NULL)
            kvp_cu.host_memory_free(b->fetched[place].at);
}

/* Copies for threads. What they are made of is overwritten soon, so they are made within the GPU first. */

bool kvp_gpu_have_copying(kvp_gpu *gpu)
{
    return gpu->copying != NULL || kvp_cu_ok(kvp_cu.stream_new(&gpu->copying, CU_NON_BLOCKING), "a stream");
}

static bool have_copies(kvp_gpu *gpu, struct kvp_gpu_copies *copies)
{
    if (copies->copied != NULL)
        return true;
    if (!kvp_gpu_have_copying(gpu) ||
        (copies->staged == NULL && !kvp_cu_ok(kvp_cu.event_new(&copies->staged, CU_NO_TIMING), "an event")) ||
        !kvp_cu_ok(kvp_cu.event_new(&copies->copied, CU_NO_TIMING | CU_EVENT_SLEEPS), "an event"))
        return false;
    sem_init(&copies->free, 0, 1);
    return true;
}

struct kvp_gpu_copies *kvp_gpu_copies_of(kvp_gpu *gpu)
{
    struct kvp_gpu_copies *copies;

    if (!gpu->copies_taken)
        gpu->n_copies = (gpu->n_copies + 1) % KVP_COPIES;
    copies = &gpu->copies[gpu->n_copies];
    if (!have_copies(gpu, copies))
        return NULL;
    while (!gpu->copies_taken && sem_wait(&copies->free) != 0)
        ;
    gpu->copies_taken = true;
    return copies;
}

static bool have_room(kvp_gpu *gpu, struct kvp_gpu_copy *copy, size_t bytes)
{
    return kvp_gpu_grow(gpu, &copy->staged, bytes, false) && have_memory(&copy->fetched, bytes);
}

void kvp_gpu_copies_reserve(kvp_gpu *gpu, size_t keys, size_t queries)
{
    for (int i = 0; i < KVP_COPIES; i++) {
        struct kvp_gpu_copies *copies = &gpu->copies[i];
        if (!have_copies(gpu, copies) || sem_trywait(&copies->free) != 0)
            continue;
        have_room(gpu, &copies->keys, keys);
        have_room(gpu, &copies->queries, queries);
        sem_post(&copies->free);
    }
}

bool kvp_gpu_copies_stage(kvp_gpu *gpu, struct kvp_gpu_copy *copy, const abi_tensor *from, size_t step, abi_tensor *to)
{
    cu_copy_2d rows = { .from_type = CU_MEMORY_DEVICE,
                        .from_device = (cu_address)(uintptr_t)from->data,
                        .from_pitch = step * from->nb[1],
                        .to_type = CU_MEMORY_DEVICE,
                        .to_pitch = from->nb[1],
                        .width = from->nb[1],
                        .height = (size_t)from->ne[1] / step };

    *to = *from;
    to->ne[1] = from->ne[1] / (int64_t)step;
    copy->bytes = step > 1 ? rows.width * rows.height : kvp_api.nbytes(from);
    if (!have_room(gpu, copy, copy->bytes))
        return false;
    to->data = copy->fetched.at;
    rows.to_device = (cu_address)(uintptr_t)copy->staged.at;
    return kvp_cu_ok(step > 1 ? kvp_cu.copy_2d(&rows, gpu->stream)
                              : kvp_cu.copy_within(rows.to_device, rows.from_device, copy->bytes, gpu->stream),
                     "copying");
}

static bool send(kvp_gpu *gpu, const struct kvp_gpu_copy *copy)
{
    return kvp_cu_ok(kvp_cu.copy_out(copy->fetched.at, (cu_address)(uintptr_t)copy->staged.at, copy->bytes, gpu->copying), "copying");
}

bool kvp_gpu_copies_send(kvp_gpu *gpu, struct kvp_gpu_copies *copies)
{
    return kvp_cu_ok(kvp_cu.event_record(copies->staged, gpu->stream), "copying") &&
           kvp_cu_ok(kvp_cu.stream_wait(gpu->copying, copies->staged, 0), "copying") && send(gpu, &copies->keys) &&
           send(gpu, &copies->queries) && kvp_cu_ok(kvp_cu.event_record(copies->copied, gpu->copying), "copying");
}

static void release(struct kvp_gpu_copy *copy)
{
    kvp_gpu_release(&copy->staged);
    if (copy->fetched.at != NULL)
        kvp_cu.host_memory_free(copy->fetched.at);
}

void kvp_gpu_copies_release(kvp_gpu *gpu)
{
    for (int i = 0; i < KVP_COPIES; i++) {
        struct kvp_gpu_copies *copies = &gpu->copies[i];
        if (copies->staged != NULL)
            kvp_cu.event_free(copies->staged);
        if (copies->copied != NULL) {
            while ((i != gpu->n_copies || !gpu->copies_taken) && sem_wait(&copies->free) != 0)
                ;
            kvp_cu.event_free(copies->copied);
            sem_destroy(&copies->free);
        }
        release(&copies->keys);
        release(&copies->queries);
        *copies = (struct kvp_gpu_copies){ 0 };
    }
    gpu->copies_taken = false;
    if (gpu->copying != NULL)
        kvp_cu.stream_free(gpu->copying);
    gpu->copying = NULL;
}
