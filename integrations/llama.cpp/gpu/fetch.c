/* fetch.c - copies a graph's keys and values to the computer's memory, and rows of saved states to
 * and from the GPU. */
#include "gpu.h"

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
    return kvp_cu_read(to->data, from->data, bytes, b->gpu->stream);
}

void kvp_gpu_fetch_release(kvp_gpu_backend *b)
{
    for (int kind = 0; kind < KVP_N_FETCHED; kind++)
        if (b->fetched[kind].at != NULL)
            kvp_cu.host_memory_free(b->fetched[kind].at);
}

/* CUDA holds a lock while it copies from or to memory that it does not know, and a thread that
 * launches kernels waits for it. So rows are copied through pieces of memory that CUDA knows, to
 * and from which the GPU copies by itself. */

#define PIECE_BYTES ((size_t)1 << 18) /* larger pieces copy no faster */

struct kvp_gpu_piece {
    struct kvp_gpu_piece *next;
    cu_event done; /* the GPU has made its copy */
    float numbers[PIECE_BYTES / sizeof(float)];
};

static void free_piece(struct kvp_gpu_piece *piece)
{
    if (piece->done != NULL)
        kvp_cu.event_free(piece->done);
    kvp_cu.host_memory_free(piece);
}

static struct kvp_gpu_piece *new_piece(void)
{
    struct kvp_gpu_piece *piece;
    void *memory = NULL;

    if (!kvp_cu_ok(kvp_cu.host_memory_new(&memory, sizeof(*piece), CU_HOST_PORTABLE_MAPPED),
                   "allocating host memory"))
        return NULL;
    piece = memory;
    piece->done = NULL;
    if (kvp_cu_ok(kvp_cu.event_new(&piece->done, CU_NO_TIMING), "creating an event"))
        return piece;
    free_piece(piece);
    return NULL;
}

static struct kvp_gpu_piece *take_piece(kvp_gpu *gpu)
{
    struct kvp_gpu_piece *piece;

    pthread_mutex_lock(&gpu->list_lock);
    piece = gpu->pieces;
    if (piece != NULL)
        gpu->pieces = piece->next;
    pthread_mutex_unlock(&gpu->list_lock);
    return piece != NULL ? piece : new_piece();
}

static void give_piece(kvp_gpu *gpu, struct kvp_gpu_piece *piece)
{
    pthread_mutex_lock(&gpu->list_lock);
    piece->next = gpu->pieces;
    gpu->pieces = piece;
    pthread_mutex_unlock(&gpu->list_lock);
}

/* Saved states. Their rows lie at equal distances (pitch) in the computer's memory, and one after
 * another on the GPU. While the GPU copies to or from a piece, the computer copies from or to
 * another one. */

typedef struct pitched {
    kvp_gpu *gpu;
    char *rows;
    size_t pitch, width, n; /* n: bytes of all rows */
    cu_address at;
    bool out;
} pitched;

static size_t bytes_of_piece(const pitched *p, size_t first)
{
    return p->n - first < PIECE_BYTES ? p->n - first : PIECE_BYTES;
}

/* The computer's part: between a piece and the rows, from the first-th byte of all rows on. */
static void copy_rows_of(const pitched *p, struct kvp_gpu_piece *piece, size_t first)
{
    const size_t n = bytes_of_piece(p, first);
    char *bytes = (char *)piece->numbers;

    for (size_t done = 0, some; done < n; done += some, first += some) {
        char *row = p->rows + first / p->width * p->pitch + first % p->width;
        some = p->width - first % p->width < n - done ? p->width - first % p->width : n - done;
        memcpy(p->out ? row : bytes + done, p->out ? bytes + done : row, some);
    }
}

/* The GPU's part, which has been made when piece->done has happened. */
static bool begin_piece(const pitched *p, struct kvp_gpu_piece *piece, size_t first)
{
    const size_t n = bytes_of_piece(p, first);

    return kvp_cu_ok(p->out ? kvp_cu.copy_out(piece->numbers, p->at + first, n, p->gpu->stream)
                            : kvp_cu.copy_in(p->at + first, piece->numbers, n, p->gpu->stream),
                     "copying") &&
           kvp_cu_ok(kvp_cu.event_record(piece->done, p->gpu->stream), "copying");
}

static bool finish_piece(const struct kvp_gpu_piece *piece)
{
    return kvp_cu_ok(kvp_cu.event_finish(piece->done), "copying");
}

static bool copy_out_pieces(const pitched *p, struct kvp_gpu_piece *pieces[2])
{
    bool ok = p->n == 0 || begin_piece(p, pieces[0], 0);

    for (size_t first = 0, i = 0; first < p->n && ok; first += PIECE_BYTES, i = 1 - i) {
        if (first + PIECE_BYTES < p->n)
            ok = begin_piece(p, pieces[1 - i], first + PIECE_BYTES);
        ok = ok && finish_piece(pieces[i]);
        if (ok)
            copy_rows_of(p, pieces[i], first);
    }
    return ok;
}

static bool copy_in_pieces(const pitched *p, struct kvp_gpu_piece *pieces[2])
{
    bool ok = true;

    for (size_t first = 0, i = 0; first < p->n && ok; first += PIECE_BYTES, i = 1 - i) {
        if (first >= 2 * PIECE_BYTES)
            ok = finish_piece(pieces[i]);
        if (ok)
            copy_rows_of(p, pieces[i], first);
        ok = ok && begin_piece(p, pieces[i], first);
    }
    return ok;
}

/* A piece is given back when the GPU does not use it any more. */
static bool copy_rows(const pitched *p)
{
    struct kvp_gpu_piece *pieces[2] = { take_piece(p->gpu), take_piece(p->gpu) };
    bool ok = pieces[0] != NULL && pieces[1] != NULL &&
              (p->out ? copy_out_pieces(p, pieces) : copy_in_pieces(p, pieces));

    ok = kvp_cu_finish(p->gpu->stream, "copying") && ok;
    for (int i = 0; i < 2; i++)
        if (pieces[i] != NULL)
            give_piece(p->gpu, pieces[i]);
    return ok;
}

bool kvp_gpu_copy_out_rows(kvp_gpu *gpu, void *to, size_t pitch, const void *from, size_t width,
                           size_t n)
{
    return copy_rows(
        &(pitched){ gpu, to, pitch, width, n * width, (cu_address)(uintptr_t)from, true });
}

bool kvp_gpu_copy_in_rows(kvp_gpu *gpu, void *to, const void *from, size_t pitch, size_t width,
                          size_t n)
{
    return copy_rows(&(pitched){ gpu, (char *)(uintptr_t)from, pitch, width, n * width,
                                 (cu_address)(uintptr_t)to, false });
}

void kvp_gpu_copying_release(kvp_gpu *gpu)
{
    while (gpu->pieces != NULL) {
        struct kvp_gpu_piece *next = gpu->pieces->next;
        free_piece(gpu->pieces);
        gpu->pieces = next;
    }
}
