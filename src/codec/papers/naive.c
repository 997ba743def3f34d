/* naive.c - `naive`: HQMQ's disentangling baseline (its section 4.5). Chunks of 4 channels are
 * symmetric integers per token, as in `int-b:sym`, unless they are outliers of their page
 * (outlier_pool.h). The paper's naive INT without outliers is `int-b:sym`.
 *
 * A chunk is one code of 4 b bits. Symmetric codes never have a field of 0, so a first field of 0
 * says "outlier", and the remaining three fields name its slot. format.md, "Outliers of a page". */
#include <math.h>
#include <string.h>

#include "../../base/half.h"
#include "../../page/chunks.h"
#include "outlier_pool.h"

#define MAX_CHUNKS (KVANT_MAX_HEAD_DIM / 4)

typedef struct naive {
    kvant_chunk_layout layout;
    kvant_outlier_pool pool;
    uint32_t bits;
    int32_t top; /* the largest level; the largest code is twice the largest level plus 1 */
    bool range_all;
} naive;

typedef struct naive_options {
    int32_t med, range, slots;
} naive_options;

static const kvant_option table[] = {
    KVANT_NUMBER(naive_options, med, 0, 1000, 3,
                 "chunks longer than N medians of their page stay fp16"),
    KVANT_CHOICE(naive_options, range, kvant_outlier_range_names, 0,
                 "chunks that the scale covers"),
    KVANT_NUMBER(naive_options, slots, 1, 8192, KVANT_OPTION_ABSENT,
                 "room for such chunks per page"),
    { .key = NULL },
};

static float largest_of(const float *y, uint32_t head_dim, const bool *is_outlier, bool all)
{
    float largest = 0;
    for (uint32_t j = 0; j < head_dim; j++)
        if (all || !is_outlier[j / 4])
            largest = fabsf(y[j]) > largest ? fabsf(y[j]) : largest;
    return largest;
}

/* Half to even, for |x| < 2^22. */
static int32_t round_even(float x)
{
    return (int32_t)((x + 12582912.0f) - 12582912.0f);
}

static uint32_t chunk_code(const naive *n, const float *y, uint32_t chunk, float inverse)
{
    uint32_t code = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const float x = 4 * chunk + i < n->pool.head_dim ? y[4 * chunk + i] * inverse : 0;
        const float top = (float)n->top, cut = x < -top ? -top : x > top ? top : x;
        code |= (uint32_t)(round_even(cut) + n->top + 1) << i * n->bits;
    }
    return code;
}

static void encode_row(const kvant_codec *codec, const float *y, uint32_t token, void *page,
                       kvant_outlier_choice *choice, uint32_t *slot)
{
    const naive *n = codec->state;
    uint16_t *metadata = kvant_codec_metadata(codec, page);
    bool is_outlier[MAX_CHUNKS];
    uint32_t codes[MAX_CHUNKS];
    for (uint32_t c = 0; c < n->pool.n_chunks; c++)
        is_outlier[c] = kvant_outlier_is_next(&n->pool, choice, y, c);
    const float largest = largest_of(y, n->pool.head_dim, is_outlier, n->range_all);
    metadata[token] = kvant_half_from_float(largest / (float)n->top);
    const float scale = kvant_half_to_float(metadata[token]), inverse = scale > 0 ? 1 / scale : 0;
    for (uint32_t c = 0; c < n->pool.n_chunks; c++) {
        codes[c] = is_outlier[c] ? *slot << n->bits : chunk_code(n, y, c, inverse);
        if (is_outlier[c])
            kvant_outlier_put(&n->pool, y, c, metadata + KVANT_PAGE_TOKENS, (*slot)++);
    }
    kvant_chunk_layout_put(&n->layout, page, token, codes);
}

static void naive_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                         uint32_t token, void *page)
{
    const naive *n = codec->state;
    kvant_outlier_choice choice = kvant_outlier_pool_choose(&n->pool, y);
    uint32_t slot = 0;
    (void)kernels;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++, y += n->pool.head_dim)
        encode_row(codec, y, token + t, page, &choice, &slot);
    memset(kvant_codec_metadata(codec, page) + KVANT_PAGE_TOKENS + 4 * (size_t)slot, 0,
           (n->pool.slots - slot) * 4 * sizeof(uint16_t));
}

/* A first field of 0 names a slot. A slot that does not exist, which encoders never write, decodes
 * to zeros. */
static void decode_chunk(const naive *n, const uint16_t *metadata, float scale, uint32_t code,
                         float chunk[4])
{
    const uint32_t mask = (1u << n->bits) - 1, slot = code >> n->bits;
    memset(chunk, 0, 4 * sizeof *chunk);
    if (code & mask)
        for (uint32_t i = 0; i < 4; i++)
            chunk[i] = scale * (float)((int32_t)(code >> i * n->bits & mask) - n->top - 1);
    else if (slot < n->pool.slots)
        kvant_outlier_get(metadata + KVANT_PAGE_TOKENS, slot, chunk);
}

static void naive_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                         uint32_t token, float *y)
{
    const naive *n = codec->state;
    const uint16_t *metadata = kvant_codec_metadata_of(codec, page);
    uint32_t codes[MAX_CHUNKS];
    float decoded[KVANT_MAX_HEAD_DIM];
    (void)kernels;
    kvant_chunk_layout_get(&n->layout, page, token, codes);
    for (uint32_t c = 0; c < n->pool.n_chunks; c++)
        decode_chunk(n, metadata, kvant_half_to_float(metadata[token]), codes[c],
                     decoded + (size_t)4 * c);
    memcpy(y, decoded, n->pool.head_dim * sizeof *y);
}

static const kvant_quantizer naive_quantizer = { kvant_outlier_pool_check, naive_encode,
                                                 naive_decode, kvant_unpack_decoded };

static void set_view(kvant_codec *codec)
{
    const naive *n = codec->state;
    kvant_general_view *view = &codec->view.general;
    view->kind = KVANT_GENERAL_FIELDS;
    view->chunks.n = n->pool.n_chunks;
    view->chunks.index_bits = n->bits;
    view->chunks.length_bits = 3 * n->bits; /* they name a slot */
    view->chunks.pool = n->pool.slots;
    view->chunks.whole_range = n->range_all;
    view->chunks.multiple = n->pool.multiple;
}

static kvant_status build(kvant_codec *codec, uint32_t bits, naive_options *o,
                          const kvant_error *error)
{
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(naive)));
    naive *n = codec->state;
    const uint32_t d = codec->info.head_dim;
    *n = (naive){ .bits = bits,
                  .top = (1 << (bits - 1)) - 1,
                  .range_all = o->range == 1,
                  .pool = { .head_dim = d, .n_chunks = (d + 3) / 4 } };
    KVANT_FORWARD(
        kvant_outlier_pool_resolve(&n->pool, o->med, o->slots, 1u << 3 * bits, "naive", error));
    o->slots = (int32_t)n->pool.slots;
    kvant_chunk_layout_init(&n->layout, codec->info.role, n->pool.n_chunks, 4 * bits);
    kvant_layout_init(&codec->layout, codec->info.role, d, bits); /* the order of unpacked tiles */
    kvant_codec_set_page(codec, bits, n->layout.code_bytes,
                         sizeof(uint16_t) * (KVANT_PAGE_TOKENS + 4 * (size_t)n->pool.slots));
    const double share = (double)n->pool.slots / (KVANT_PAGE_TOKENS * n->pool.n_chunks);
    codec->info.nominal_bits = (1 - share) * bits + 16 * share + 0.25; /* the paper's formula (2) */
    codec->info.block_tokens = KVANT_PAGE_TOKENS;
    codec->quantizer = &naive_quantizer;
    set_view(codec);
    return KVANT_OK;
}

static kvant_status create_naive(kvant_codec *codec, const kvant_request *request,
                                 const kvant_error *error)
{
    const kvant_transform_defaults defaults = { KVANT_ROTATE_NONE, KVANT_MAX_HEAD_DIM, true };
    naive_options o = *(const naive_options *)request->options;
    uint32_t bits;
    KVANT_FORWARD(kvant_spec_bits(request->spec, 2, 7, &bits, error));
    KVANT_FORWARD(kvant_codec_set_transform(codec, request, defaults, error));
    KVANT_FORWARD(build(codec, bits, &o, error));
    kvant_codec_describe(codec, table, &o, "naive-%u", (unsigned)bits);
    return KVANT_OK;
}

KVANT_FAMILY(naive, "2 3 4 5 6 7", "HQMQ, section 4.5",
             "symmetric int per token; 4-channel chunks far above the page's median stay fp16",
             table, kvant_common_options_ordered, create_naive)
