/* fetch.c - copies rows, queries and positions to the computer's memory, where transforms are
 * learned. */
#include "learner.h"

#include <string.h>

#include "../ggml_api.h"

static bool have_memory(struct kvp_gpu_fetched *fetched, size_t bytes)
{
    void *memory = NULL;

    if (bytes <= fetched->bytes)
        return true;
    if (!kvp_cu_ok(kvp_cu.host_memory_new(&memory, bytes, CU_HOST_PORTABLE_MAPPED),
                   "allocating host memory"))
        return false;
    if (fetched->at != NULL)
        kvp_cu.host_memory_free(fetched->at);
    *fetched = (struct kvp_gpu_fetched){ memory, bytes };
    return true;
}

bool kvp_gpu_fetch(kvp_gpu_backend *b, kvp_fetched kind, const abi_tensor *from, abi_tensor *to)
{
    struct kvp_gpu_fetched *memory = &b->fetched[kind];
    const size_t bytes = kvp_api.nbytes(from);

    if (!have_memory(memory, bytes))
        return false;
    *to = *from;
    to->data = memory->at;
    return kvp_cu_ok(
               kvp_cu.copy_out(to->data, (cu_address)(uintptr_t)from->data, bytes, b->gpu->stream),
               "copying") &&
           kvp_cu_ok(kvp_cu.stream_finish(b->gpu->stream), "copying");
}

void kvp_gpu_fetch_release(kvp_gpu_backend *b)
{
    for (int kind = 0; kind < KVP_N_FETCHED; kind++)
        if (b->fetched[kind].at != NULL)
            kvp_cu.host_memory_free(b->fetched[kind].at);
}

/* Copies that threads make. CUDA holds a lock while it copies to memory that it does not know, and
 * llama.cpp's thread waits for the lock when it launches kernels. With 15 threads the lock was held
 * for most of a prompt's first batch. So threads copy through pieces of memory that CUDA knows, to
 * which the GPU copies by itself. */

#define PIECE_BYTES ((size_t)1 << 18) /* larger pieces copy no faster */

struct kvp_gpu_piece {
    struct kvp_gpu_piece *next;
    float numbers[PIECE_BYTES / sizeof(float)];
};

static struct kvp_gpu_piece *take_piece(kvp_gpu *gpu)
{
    struct kvp_gpu_piece *piece;
    void *memory = NULL;

    pthread_mutex_lock(&gpu->list_lock);
    piece = gpu->pieces;
    if (piece != NULL)
        gpu->pieces = piece->next;
    pthread_mutex_unlock(&gpu->list_lock);
    if (piece == NULL &&
        kvp_cu_ok(kvp_cu.host_memory_new(&memory, sizeof(*piece), CU_HOST_PORTABLE_MAPPED),
                  "allocating host memory"))
        piece = memory;
    return piece;
}

static void give_piece(kvp_gpu *gpu, struct kvp_gpu_piece *piece)
{
    pthread_mutex_lock(&gpu->list_lock);
    piece->next = gpu->pieces;
    gpu->pieces = piece;
    pthread_mutex_unlock(&gpu->list_lock);
}

bool kvp_gpu_copy_numbers(kvp_gpu *gpu, float *to, const void *from, size_t n, bool halves)
{
    const size_t size = halves ? sizeof(uint16_t) : sizeof(float), most = PIECE_BYTES / size;
    struct kvp_gpu_piece *piece = take_piece(gpu);
    bool ok = piece != NULL;

    for (size_t i = 0, some; i < n && ok; i += some) {
        some = n - i < most ? n - i : most;
        ok = kvp_cu_ok(kvp_cu.copy_out(piece->numbers, (cu_address)(uintptr_t)from + i * size,
                                       some * size, gpu->copying),
                       "copying") &&
             kvp_cu_ok(kvp_cu.stream_finish(gpu->copying), "copying");
        if (ok && halves)
            kvp_api.fp16_to_fp32_row((const void *)piece->numbers, to + i, (int64_t)some);
        else if (ok)
            memcpy(to + i, piece->numbers, some * size);
    }
    if (piece != NULL)
        give_piece(gpu, piece);
    return ok;
}

/* Saved states. Their rows lie at equal distances (pitch) in the computer's memory, and one after
 * another on the GPU. */

/* Copies n bytes between a piece and these rows, from the at-th byte of all rows on. */
static void copy_pitched(char *piece, char *rows, size_t pitch, size_t width, size_t at, size_t n,
                         bool out)
{
    for (size_t done = 0, some; done < n; done += some, at += some) {
        char *row = rows + at / width * pitch + at % width;
        some = width - at % width < n - done ? width - at % width : n - done;
        memcpy(out ? row : piece + done, out ? piece + done : row, some);
    }
}

static bool copy_rows(kvp_gpu *gpu, char *rows, size_t pitch, cu_address at, size_t width, size_t n,
                      bool out)
{
    struct kvp_gpu_piece *piece = take_piece(gpu);
    bool ok = piece != NULL;

    for (size_t done = 0, some; done < n * width && ok; done += some) {
        char *bytes = (char *)piece->numbers;
        some = n * width - done < PIECE_BYTES ? n * width - done : PIECE_BYTES;
        if (!out)
            copy_pitched(bytes, rows, pitch, width, done, some, false);
        ok = kvp_cu_ok(out ? kvp_cu.copy_out(bytes, at + done, some, gpu->stream)
                           : kvp_cu.copy_in(at + done, bytes, some, gpu->stream),
                       "copying") &&
             kvp_cu_ok(kvp_cu.stream_finish(gpu->stream), "copying");
        if (ok && out)
            copy_pitched(bytes, rows, pitch, width, done, some, true);
    }
    if (piece != NULL)
        give_piece(gpu, piece);
    return ok;
}

bool kvp_gpu_copy_out_rows(kvp_gpu *gpu, void *to, size_t pitch, const void *from, size_t width,
                           size_t n)
{
    return copy_rows(gpu, to, pitch, (cu_address)(uintptr_t)from, width, n, true);
}

bool kvp_gpu_copy_in_rows(kvp_gpu *gpu, void *to, const void *from, size_t pitch, size_t width,
                          size_t n)
{
    return copy_rows(gpu, (char *)(uintptr_t)from, pitch, (cu_address)(uintptr_t)to, width, n,
                     false);
}

bool kvp_gpu_ensure_copy_stream(kvp_gpu *gpu)
{
    return gpu->copying != NULL ||
           kvp_cu_ok(kvp_cu.stream_new(&gpu->copying, CU_NON_BLOCKING), "creating a stream");
}

void kvp_gpu_copying_release(kvp_gpu *gpu)
{
    for (const kvp_gpu_cache *cache = gpu->caches; cache != NULL; cache = cache->next)
        for (size_t i = 0; i < cache->n_tensors; i++) {
            const kvp_gpu_cells *cells = cache->tensors[i]->cells;
            if (cells->learner != NULL)
                kvp_gpu_learner_finish(cells->learner);
        }
    if (gpu->copying != NULL)
        kvp_cu.stream_free(gpu->copying);
    gpu->copying = NULL;
    while (gpu->pieces != NULL) {
        struct kvp_gpu_piece *next = gpu->pieces->next;
        kvp_cu.host_memory_free(gpu->pieces);
        gpu->pieces = next;
    }
}
