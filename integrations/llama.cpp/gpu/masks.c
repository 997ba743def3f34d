/* masks.c - reads llama.cpp's masks on their way to the GPU, and finds out which need not be read
 * by attention.
 *
 * Most masks hide later tokens and nothing else. Then attention takes the number of cells instead
 * of the mask: kernels without a mask are faster, and stop at the last cell instead of the next
 * multiple of 256. The numbers are in GPU memory, so a graph that was captured with them can be
 * replayed. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#include "../../../src/base/parallel.h"

enum { SEEN = 0, HIDDEN = 0xfc00 }; /* fp16 numbers of a mask: 0 and -infinity */

/* Numbers that are compared at once, as many as a block has tokens. The compiler vectorises a loop
 * of constant length. A prompt's mask has megabytes, and the GPU waits while it is read. */
enum { PIECE = KVANT_PAGE_TOKENS };

static bool all_are(const uint16_t *mask, size_t n, uint16_t value)
{
    size_t i = 0;

    for (; i + PIECE <= n; i += PIECE) {
        uint16_t others = 0;
        for (size_t j = 0; j < PIECE; j++)
            others |= mask[i + j] ^ value;
        if (others != 0)
            return false;
    }
    while (i < n && mask[i] == value)
        i++;
    return i == n;
}

static size_t count_seen(const uint16_t *mask, size_t n)
{
    size_t i = 0;

    while (i + PIECE <= n && all_are(mask + i, PIECE, SEEN))
        i += PIECE;
    while (i < n && mask[i] == SEEN)
        i++;
    return i;
}

/* Rows of a mask that one call of a thread compares, and the threads. A prompt's mask at 8192
 * tokens is 8 MiB, which one thread reads in 0.35 ms. */
enum { ROWS_OF_PIECE = 64, MASK_THREADS = 4 };

typedef struct mask_rows {
    const uint16_t *mask;
    size_t n_cells, n_rows;
    atomic_bool counts; /* each row sees one cell more than the row before it */
} mask_rows;

/* A row that sees one cell more than the row before it is a seen cell, and then that row. The
 * library's memcmp reads faster than a loop here. */
static void compare_rows(void *context, size_t piece, uint32_t worker)
{
    mask_rows *of = context;
    const size_t begin = 1 + piece * ROWS_OF_PIECE,
                 end = begin + ROWS_OF_PIECE < of->n_rows ? begin + ROWS_OF_PIECE : of->n_rows;

    (void)worker;
    for (size_t row = begin; row < end && atomic_load(&of->counts); row++) {
        const uint16_t *own = of->mask + row * of->n_cells;
        if (own[0] != SEEN ||
            memcmp(own + 1, own - of->n_cells, (of->n_cells - 1) * sizeof(*own)) != 0)
            atomic_store(&of->counts, false);
    }
}

/* The number of cells that the last of these rows sees, if each row sees one cell more than the row
 * before it and no other; otherwise 0. */
static int32_t length_of(const uint16_t *mask, size_t n_cells, size_t n_rows)
{
    const size_t first = count_seen(mask, n_cells);
    mask_rows rows = { mask, n_cells, n_rows, true };

    if (first == 0 || first + n_rows - 1 > n_cells ||
        !all_are(mask + first, n_cells - first, HIDDEN))
        return 0;
    kvant_parallel_for((n_rows - 1 + ROWS_OF_PIECE - 1) / ROWS_OF_PIECE, MASK_THREADS, compare_rows,
                       &rows);
    return atomic_load(&rows.counts) ? (int32_t)(first + n_rows - 1) : 0;
}

static size_t words_of(const kvp_gpu_mask *mask)
{
    return (mask->n_cells + 64 * KVANT_PAGE_TOKENS - 1) / (64 * KVANT_PAGE_TOKENS);
}

/* Finds the blocks that each row sees; false without memory. */
static bool read_bits(kvp_gpu_mask *mask, const uint16_t *data)
{
    const size_t n_rows = mask->n_rows * mask->n_streams, words = words_of(mask);

    if (n_rows * words > mask->most_bits) {
        free(mask->bits);
        mask->bits = malloc(n_rows * words * sizeof(*mask->bits));
        mask->most_bits = mask->bits != NULL ? n_rows * words : 0;
    }
    if (mask->bits == NULL)
        return false;
    memset(mask->bits, 0, n_rows * words * sizeof(*mask->bits));
    for (size_t row = 0; row < n_rows; row++, data += mask->n_cells)
        for (size_t cell = 0; cell < mask->n_cells; cell += KVANT_PAGE_TOKENS) {
            const size_t left = mask->n_cells - cell, block = cell / KVANT_PAGE_TOKENS;
            const size_t n = left < KVANT_PAGE_TOKENS ? left : KVANT_PAGE_TOKENS;
            if (!all_are(data + cell, n, HIDDEN))
                mask->bits[row * words + block / 64] |= (uint64_t)1 << block % 64;
        }
    return true;
}

static kvp_gpu_mask *entry_of(kvp_gpu *gpu, const void *at)
{
    kvp_gpu_mask *mask = gpu->masks;

    while (mask != NULL && mask->at != at)
        mask = mask->next;
    if (mask == NULL && (mask = calloc(1, sizeof(*mask))) != NULL) {
        mask->at = at;
        mask->next = gpu->masks;
        gpu->masks = mask;
    }
    return mask;
}

void kvp_gpu_note_mask(kvp_gpu *gpu, const abi_tensor *tensor, const void *data, size_t size)
{
    kvp_gpu_mask *mask =
        gpu->caches != NULL ? entry_of(gpu, tensor->data) : NULL; /* a GPU has two device names */
    const size_t n_cells = (size_t)tensor->ne[0], n_rows = (size_t)tensor->ne[1],
                 n_streams = (size_t)tensor->ne[3];

    if (mask == NULL)
        return;
    mask->n_cells = n_cells;
    mask->n_rows = n_rows;
    mask->n_streams = n_streams;
    mask->known = tensor->ne[2] == 1 && size == n_streams * n_rows * n_cells * sizeof(uint16_t);
    mask->plain = mask->known && n_streams <= KVP_MOST_STREAMS;
    for (size_t s = 0; s < n_streams && mask->plain; s++) {
        mask->lengths[s] =
            length_of((const uint16_t *)data + s * n_rows * n_cells, n_cells, n_rows);
        mask->plain = mask->lengths[s] > 0;
    }
    mask->in_order = mask->plain;
    mask->known = mask->known && (mask->in_order || read_bits(mask, data));
}

const kvp_gpu_mask *kvp_gpu_mask_of(const kvp_gpu *gpu, const abi_tensor *node, size_t n)
{
    const abi_tensor *at = node != NULL ? node->src[3] : NULL;
    const kvp_gpu_mask *mask = at != NULL ? gpu->masks : NULL;

    while (mask != NULL && mask->at != at->data)
        mask = mask->next;
    return mask != NULL && mask->known && mask->n_rows * mask->n_streams == n &&
                   mask->n_cells == (size_t)node->src[1]->ne[1]
               ? mask
               : NULL;
}

bool kvp_gpu_mask_sees(const kvp_gpu_mask *mask, size_t row, size_t block)
{
    const size_t stream = row / mask->n_rows, behind = mask->n_rows - 1 - row % mask->n_rows;

    if (mask->in_order)
        return block * KVANT_PAGE_TOKENS + behind < (size_t)mask->lengths[stream];
    return block * KVANT_PAGE_TOKENS < mask->n_cells &&
           (mask->bits[row * words_of(mask) + block / 64] >> block % 64 & 1);
}

void kvp_gpu_forget_masks(kvp_gpu_backend *b)
{
    for (kvp_gpu_mask *mask = b->gpu->masks; mask != NULL; mask = mask->next)
        for (int i = 0; i < b->n_attended; i++)
            mask->known = mask->known && mask->at != b->attended[i].mask;
}

/* Takes the lengths of a plain mask. A mask is used once per graph, because its memory may hold
 * anything afterwards. */
static bool take(kvp_gpu *gpu, const struct kvp_gpu_attended *of, int32_t *lengths)
{
    kvp_gpu_mask *mask = gpu->masks;
    bool plain;

    while (mask != NULL && mask->at != of->mask)
        mask = mask->next;
    plain = mask != NULL && mask->plain && mask->n_cells == of->n_cells &&
            mask->n_rows == of->n_rows && mask->n_streams == of->n_streams;
    if (plain)
        memcpy(lengths, mask->lengths, of->n_streams * sizeof(*lengths));
    if (mask != NULL)
        mask->plain = false;
    return plain;
}

static bool is_of(const struct kvp_gpu_attended *a, const abi_tensor *node)
{
    const abi_tensor *mask = node->src[3];

    return a->mask == (mask != NULL ? mask->data : NULL) &&
           a->n_cells == (size_t)node->src[1]->ne[1] && a->n_rows == (size_t)node->src[0]->ne[1] &&
           a->n_streams == (size_t)node->src[0]->ne[3];
}

int kvp_gpu_attended_of(const kvp_gpu_backend *b, const abi_tensor *node)
{
    int i = 0;

    while (i < b->n_attended && !is_of(&b->attended[i], node))
        i++;
    return i < b->n_attended ? i : -1;
}

bool kvp_gpu_find_attended(kvp_gpu_backend *b, const abi_tensor *node)
{
    if (kvp_gpu_attended_of(b, node) >= 0)
        return true;
    if (b->n_attended == KVP_MOST_MASKS || node->src[0]->ne[3] > KVP_MOST_STREAMS)
        return false;
    b->attended[b->n_attended++] =
        (struct kvp_gpu_attended){ .mask = node->src[3] != NULL ? node->src[3]->data : NULL,
                                   .n_cells = (size_t)node->src[1]->ne[1],
                                   .n_rows = (size_t)node->src[0]->ne[1],
                                   .n_streams = (size_t)node->src[0]->ne[3] };
    return true;
}

int32_t *kvp_gpu_lengths(const kvp_gpu_backend *b, int attended)
{
    return (int32_t *)b->lengths.at + (size_t)attended * KVP_MOST_STREAMS;
}

bool kvp_gpu_prepare_attended(kvp_gpu_backend *b)
{
    int32_t lengths[KVP_MOST_STREAMS];
    bool ok = kvp_gpu_grow(b->gpu, &b->lengths, KVP_MOST_MASKS * sizeof(lengths), false);

    for (int i = 0; i < b->n_attended && ok; i++) {
        struct kvp_gpu_attended *a = &b->attended[i];
        bool plain;
        pthread_mutex_lock(&b->gpu->lock);
        plain = take(b->gpu, a, lengths);
        pthread_mutex_unlock(&b->gpu->lock);
        for (size_t s = 0; s < a->n_streams && !plain; s++)
            lengths[s] = (int32_t)a->n_cells;
        b->masks_changed = b->masks_changed || plain != a->plain;
        a->plain = plain;
        ok = kvp_cu_write(kvp_gpu_lengths(b, i), lengths, a->n_streams * sizeof(*lengths),
                          b->gpu->stream);
    }
    return ok;
}
