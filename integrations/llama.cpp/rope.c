/* rope.c - see rope.h. */
#include "rope.h"

#include <math.h>
#include <string.h>

#include "buffer.h"
#include "ggml_api.h"
#include "log.h"

/* RoPE rotates pairs (i, i + n_dims / 2). Mode 0 rotates pairs (2i, 2i + 1). All other modes have
 * several positions per token. */
#define MODE_NEOX 2
#define TWO_PI 6.283185307179586
/* The largest error of a product of two factors that should be 1: a hundredth of fp16's
 * rounding. */
#define MAGNITUDE_ERROR 1e-5f

/* Indices of a node's parameters. FIRST is the first channel that is rotated. */
enum {
    N_DIMS = 1,
    MODE = 2,
    N_CTX_ORIG = 4,
    FREQ_BASE = 5,
    FREQ_SCALE,
    EXT_FACTOR,
    ATTN_FACTOR,
    BETA_FAST,
    BETA_SLOW,
    FIRST = 15
};

static float number(const abi_tensor *node, int i)
{
    float x;

    memcpy(&x, &node->op_params[i], sizeof(x));
    return x;
}

static bool is_known(const abi_tensor *node, uint32_t head_dim)
{
    const int32_t n_dims = node->op_params[N_DIMS], mode = node->op_params[MODE];

    return (mode == 0 || mode == MODE_NEOX) && node->op_params[FIRST] == 0 && n_dims > 0 &&
           n_dims % 2 == 0 && n_dims <= (int32_t)head_dim && number(node, FREQ_BASE) > 1 &&
           node->src[1]->type == ABI_TYPE_I32;
}

const abi_tensor *kvp_rope_of(const abi_tensor *rows, uint32_t head_dim)
{
    const abi_tensor *node = rows;

    while (node != NULL && node->op != kvp_api.op.none && kvp_is_view(node))
        node = node->src[0];
    if (node == NULL || node->op != kvp_api.op.rope || node->ne[0] != (int64_t)head_dim ||
        node->ne[0] * node->ne[1] != rows->ne[0] || node->ne[2] != rows->ne[1] ||
        node->nb[1] != head_dim * sizeof(float) || node->nb[2] != rows->nb[1] ||
        kvp_root(node) != kvp_root(rows) || node->view_offs != rows->view_offs ||
        !is_known(node, head_dim))
        return NULL;
    return node;
}

/* YaRN: the pair that makes this many full rotations within the original context. */
static float yarn_pair(const abi_tensor *node, float turns)
{
    const float n_ctx = (float)node->op_params[N_CTX_ORIG], base = number(node, FREQ_BASE);

    return (float)node->op_params[N_DIMS] * logf(n_ctx / (turns * (float)TWO_PI)) /
           (2 * logf(base));
}

/* The part of a pair's frequency that is not scaled. */
static float unscaled_part(const abi_tensor *node, int32_t pair)
{
    const float ext_factor = number(node, EXT_FACTOR), last = (float)node->op_params[N_DIMS] - 1;
    float from, to;

    if (ext_factor == 0)
        return 0;
    from = fmaxf(0, floorf(yarn_pair(node, number(node, BETA_FAST))));
    to = fminf(last, ceilf(yarn_pair(node, number(node, BETA_SLOW))));
    return ext_factor * (1 - fminf(1, fmaxf(0, ((float)pair - from) / fmaxf(0.001f, to - from))));
}

static bool read_factors(const abi_tensor *factors, float *out, int32_t n)
{
    abi_buffer *buffer = kvp_root(factors)->buffer;

    if (factors->type != ABI_TYPE_F32 || factors->ne[0] < n || factors->nb[0] != sizeof(float) ||
        buffer == NULL || factors->data == NULL)
        return false;
    buffer->iface.get_tensor(buffer, factors, out, 0, (size_t)n * sizeof(float));
    return true;
}

uint32_t kvp_rope_frequencies(const abi_tensor *node, float *out)
{
    const int32_t n = node->op_params[N_DIMS] / 2;
    const float ratio = powf(number(node, FREQ_BASE), -1.0f / (float)n);
    float factors[KVANT_MAX_HEAD_DIM / 2], plain = 1;

    if (node->src[2] != NULL && !read_factors(node->src[2], factors, n))
        return 0;
    for (int32_t i = 0; i < n; i++, plain *= ratio) {
        const float unscaled = unscaled_part(node, i),
                    factor = node->src[2] != NULL ? factors[i] : 1;
        out[i] = plain / factor * (number(node, FREQ_SCALE) * (1 - unscaled) + unscaled);
    }
    return (uint32_t)n;
}

bool kvp_rope_read(const kvp_kv *kv, const abi_tensor *rows, kvant_rope *rope, float *frequencies)
{
    const abi_tensor *node = kvp_rope_of(rows, kv->head_dim);
    const uint32_t n = node != NULL ? kvp_rope_frequencies(node, frequencies) : 0;

    *rope = (kvant_rope){ .size = sizeof(*rope),
                          .n_dims = 2 * n,
                          .interleaved = node != NULL && node->op_params[MODE] == 0,
                          .frequencies = frequencies };
    return n > 0;
}

/* The factor by which RoPE multiplies keys. YaRN's own factor is mostly the inverse of ggml's. */
static float magnitude(const abi_tensor *node)
{
    const float yarn =
        number(node, EXT_FACTOR) != 0 ? 1 + 0.1f * logf(1 / number(node, FREQ_SCALE)) : 1;

    return number(node, ATTN_FACTOR) * yarn;
}

bool kvp_rope_is_same(const kvant_rope *a, const kvant_rope *b)
{
    return a->n_dims == b->n_dims && a->interleaved == b->interleaved &&
           memcmp(a->frequencies, b->frequencies, a->n_dims / 2 * sizeof(*a->frequencies)) == 0;
}

bool kvp_rope_of_shift(const kvp_kv *kv, const abi_tensor *node, kvant_rope *rope,
                       float *frequencies)
{
    const size_t head_bytes = (size_t)kv->head_dim * sizeof(uint16_t);
    uint32_t n;

    if (!is_known(node, kv->head_dim) || node->nb[1] != head_bytes ||
        node->view_offs % head_bytes != 0 || !(fabsf(magnitude(node) - 1) < MAGNITUDE_ERROR))
        return false;
    n = kvp_rope_frequencies(node, frequencies);
    *rope = (kvant_rope){ .size = sizeof(*rope),
                          .n_dims = 2 * n,
                          .interleaved = node->op_params[MODE] == 0,
                          .frequencies = frequencies };
    return n > 0;
}

/* Tells the tensor how RoPE rotates its keys, if the graph shows it. */
static void set_rope(const kvp_kv *kv, const abi_tensor *rows, uint32_t n_positions)
{
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    kvant_rope rope;
    const bool known = kvp_rope_read(kv, rows, &rope, frequencies);

    rope.n_positions = n_positions;
    rope.block_centers = true;
    if (known && kvant_tensor_set_rope(kv->tensor, &rope) == KVANT_OK)
        kvp_note("%s: RoPE rotates %u channels, the slowest channel by %g per position", kv->name,
                 rope.n_dims, (double)frequencies[rope.n_dims / 2 - 1]);
    else
        kvp_note("%s: its RoPE is not known, so matrices are learned without it", kv->name);
}

const int32_t *kvp_rope_read_positions(const kvp_compute *compute, const abi_tensor *rows,
                                       uint32_t head_dim)
{
    const abi_tensor *node = kvp_rope_of(rows, head_dim);
    const abi_tensor *positions = node != NULL ? node->src[1] : NULL;

    if (positions == NULL || positions->ne[0] != rows->ne[1] || kvp_root(positions)->buffer == NULL)
        return NULL;
    if (kvp_api.buft_is_host(kvp_root(positions)->buffer->buft))
        return positions->data;
    return compute->read_positions != NULL ? compute->read_positions(compute->reader, positions)
                                           : NULL;
}

const int32_t *kvp_rope_positions(const kvp_compute *compute, kvp_kv *kv, const abi_tensor *rows)
{
    const int32_t *positions;
    const uint32_t most = kvp_kv_n_positions(kv);

    if (kv->shape.role != KVANT_ROLE_K ||
        !kvant_tensor_wants_queries(kv->tensor, KVANT_PAGE_TOKENS))
        return NULL; /* such a tensor never learns */
    if (!kv->roped)
        set_rope(kv, rows, most);
    kv->roped = true;
    positions = kvp_rope_read_positions(compute, rows, kv->head_dim);
    for (int64_t i = 0; positions != NULL && i < rows->ne[1]; i++)
        /* the memory of an input may have been given to another node */
        if (positions[i] < 0 || (uint32_t)positions[i] >= most)
            return NULL;
    return positions;
}
