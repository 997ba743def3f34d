/* latents.c - the public call for multi-head latent attention: checks arguments and reads pages of
 * one tensor. The tensor's rows are keys and, up to value_dim, values.
 *
 * A block's pages, one per part of a row, are unpacked when the block is scored. They stay in the
 * work item's tile until its values have been added. Every query head reads the same row, so the
 * products of dozens of query rows share the cost of unpacking. Tiles hold a line per token. So
 * scores are computed as tile x queries and then transposed, because there are fewer scores than
 * numbers in the tile. */
#include <string.h>

#include "../base/attributes.h"
#include "../base/error.h"
#include "work_item.h"

typedef struct latent_source {
    const kvant_tensor *tensor;
    uint32_t n_parts, value_parts;
    uint32_t part_dim; /* head_dim of the tensor */
} latent_source;

static const latent_source *source_of(const kvant_attention_plan *plan)
{
    return plan->source;
}

static float *tile_of(const kvant_attention_plan *plan, const kvant_attention_item *item,
                      uint32_t part)
{
    return item->k_tile + (size_t)part * KVANT_PAGE_TOKENS * source_of(plan)->part_dim;
}

/* Query rows of a work item, rounded up to a multiple of the columns of a matrix product. */
static uint32_t columns_of(uint32_t n_rows)
{
    return (n_rows + 15) / 16 * 16;
}

/* The place for scores by column: in the reader's own scratch, behind the queries by column. */
static float *score_columns(const kvant_attention_plan *plan, const kvant_attention_item *item)
{
    return item->own + (size_t)columns_of(item->n_rows) * plan->k_dim;
}

/* Puts the channels of a part into the order of an unpacked tile. */
static void place(const kvant_codec *codec, uint32_t n, const float *x, float scale, float *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[kvant_layout_row_position(&codec->layout, i)] = x[i] * scale;
}

static void read_queries(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         uint32_t view, uint32_t query, uint32_t n, uint32_t kv_head, float *out,
                         float *offsets, float *products)
{
    const kvant_attention_problem *p = &plan->problem;
    const latent_source *source = source_of(plan);
    const uint32_t d = source->part_dim;
    float x[KVANT_MAX_HEAD_DIM], y[KVANT_MAX_HEAD_DIM];
    (void)view;
    (void)kv_head;
    (void)products;
    for (uint32_t row = 0; row < n * p->n_heads; row++, out += plan->k_dim) {
        const float *q = p->q + (query + row / p->n_heads) * p->q_token_stride +
                         row % p->n_heads * p->q_head_stride;
        for (uint32_t part = 0; part < source->n_parts; part++) {
            const kvant_codec *codec = source->tensor->codecs[part];
            memcpy(x, q + part * d, d * sizeof *x);
            kvant_transform_dual(&codec->transform, kernels, 1, x, y);
            place(codec, d, y, plan->score_scale, out + part * d);
        }
        offsets[row] = 0;
    }
}

static void write_output(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         uint32_t transform_id, uint32_t head, const float *sums, float inverse,
                         float weight, float *out)
{
    const latent_source *source = source_of(plan);
    const uint32_t d = source->part_dim;
    float y[KVANT_MAX_HEAD_DIM], x[KVANT_MAX_HEAD_DIM];
    (void)transform_id;
    (void)head;
    (void)weight;
    for (uint32_t part = 0; part < source->value_parts; part++, sums += d, out += d) {
        const kvant_codec *codec = source->tensor->codecs[part];
        for (uint32_t i = 0; i < d; i++)
            y[i] = sums[kvant_layout_row_position(&codec->layout, i)] * inverse;
        kvant_transform_inverse(&codec->transform, kernels, NULL, y, x);
        for (uint32_t i = 0; i < d; i++)
            out[i] += x[i];
    }
}

static bool open_page(const kvant_attention_plan *plan, kvant_attention_item *item, uint32_t page)
{
    item->k_view = item->v_transform = 0;
    item->page_offsets = NULL;
    return kvant_attention_block(plan, page) >= 0;
}

static kvant_page_ref page_of(const kvant_attention_plan *plan, uint32_t page, uint32_t part)
{
    return kvant_tensor_page(source_of(plan)->tensor, (uint32_t)kvant_attention_block(plan, page),
                             part);
}

/* Prefetches a part of a page. The parts of a block follow each other, but the hardware does not
 * foresee the order in which kernels read a page. */
static void fetch(const kvant_attention_plan *plan, const kvant_attention_item *item, uint32_t page,
                  uint32_t part)
{
    if (page >= item->end_page || kvant_attention_block(plan, page) < 0)
        return;
    const kvant_page_ref ref = page_of(plan, page, part);
    for (size_t i = 0; i < kvant_page_ref_bytes(source_of(plan)->tensor, &ref); i += 64)
        KVANT_PREFETCH((const uint8_t *)ref.page + i);
}

static void begin(const kvant_attention_plan *plan, kvant_attention_item *item)
{
    for (uint32_t part = 0; part < source_of(plan)->n_parts; part++)
        fetch(plan, item, item->first_page, part);
}

/* Transposes query rows. This and transpose_scores are separate functions because `restrict` on
 * their arguments lets the compiler vectorise the loops. */
static void transpose(uint32_t n_rows, uint32_t n, const float *restrict rows, size_t columns,
                      float *restrict out)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t row = 0; row < columns; row++)
            out[i * columns + row] = row < n_rows ? rows[(size_t)row * n + i] : 0;
}

static void transpose_scores(uint32_t n_rows, const float *restrict from, size_t columns,
                             float *restrict scores)
{
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
            scores[(size_t)row * KVANT_PAGE_TOKENS + t] = from[t * columns + row];
}

static void take(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                 kvant_attention_item *item)
{
    (void)kernels;
    transpose(item->n_rows, plan->k_dim, item->queries, columns_of(item->n_rows), item->own);
}

static void score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                  kvant_attention_item *item, uint32_t page)
{
    const latent_source *source = source_of(plan);
    const uint32_t d = source->part_dim, columns = columns_of(item->n_rows);
    float *sums = score_columns(plan, item);
    memset(sums, 0, (size_t)columns * KVANT_PAGE_TOKENS * sizeof *sums);
    for (uint32_t part = 0; part < source->n_parts; part++) {
        const kvant_page_ref ref = page_of(plan, page, part);
        float *tile = tile_of(plan, item, part);
        fetch(plan, item, page + 1, part);
        kvant_attention_unpack(kernels, &ref, tile);
        kernels->matmul(tile, d, item->own + (size_t)part * d * columns, columns, sums, columns,
                        KVANT_PAGE_TOKENS, d, columns);
    }
    transpose_scores(item->n_rows, sums, columns, item->scores);
}

/* Adds the page. The tile still holds it, because a work item adds a page right after it scores
 * it. */
static void add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                kvant_attention_item *item, uint32_t page)
{
    const latent_source *source = source_of(plan);
    const uint32_t d = source->part_dim;
    (void)page;
    for (uint32_t part = 0; part < source->value_parts; part++)
        kernels->matmul(item->scores, KVANT_PAGE_TOKENS, tile_of(plan, item, part), d,
                        item->sums[0] + part * d, plan->v_dim, item->n_rows, KVANT_PAGE_TOKENS, d);
}

static const kvant_attention_reader reader = {
    .queries = read_queries,
    .output = write_output,
    .open = open_page,
    .begin = begin,
    .take = take,
    .score = score,
    .add = add,
};

static kvant_status invalid(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "latent attention: %s", what);
}

static kvant_status check_rows(const kvant_tensor *rows, uint32_t value_dim)
{
    if (!rows || kvant_tensor_codec_info(rows)->role != KVANT_ROLE_V)
        return invalid("rows is NULL, or a tensor of keys: latents are stored with KVANT_ROLE_V");
    if (rows->head_dim % KVANT_TILE || rows->codecs[0]->layout.padded_dim != rows->head_dim)
        return invalid("the head_dim of rows is not a multiple of 16");
    if (!value_dim || value_dim % rows->head_dim || value_dim / rows->head_dim > rows->n_kv_heads)
        return invalid(
            "value_dim is 0, not a multiple of the head_dim of rows, or larger than a row");
    if (rows->learns || rows->learning || rows->device || rows->shifts)
        return invalid(
            "rows must be in the computer's memory, without shifts and without codecs that learn");
    for (uint32_t part = 0; part < rows->n_kv_heads; part++)
        if (rows->codecs[part]->file_center || rows->codecs[part]->file_scale)
            return invalid("a codec of rows takes its centre or scale from a calibration: use one "
                           "without center=file and norm=file");
    return KVANT_OK;
}

static kvant_status make_plan(const kvant_tensor *rows, uint32_t value_dim,
                              const kvant_attention_problem *problem, latent_source *source,
                              kvant_attention_plan *plan)
{
    KVANT_FORWARD(check_rows(rows, value_dim));
    *source = (latent_source){ rows, rows->n_kv_heads, value_dim / rows->head_dim, rows->head_dim };
    *plan = (kvant_attention_plan){ .reader = &reader,
                                    .source = source,
                                    .k_views.n = 1,
                                    .v_transforms.n = 1,
                                    .k_dim = rows->n_kv_heads * rows->head_dim,
                                    .v_dim = value_dim };
    plan->own_per_row = plan->k_dim + (size_t)KVANT_PAGE_TOKENS;
    KVANT_FORWARD(kvant_attention_accept_problem(plan, problem, 1));
    KVANT_FORWARD(kvant_attention_check_blocks(plan, rows->n_blocks));
    return kvant_attention_cut(plan) ? KVANT_OK
                                     : invalid("the workspace would be larger than memory can be: "
                                               "choose fewer tokens or threads");
}

kvant_status kvant_latent_attention_workspace(const kvant_tensor *rows, uint32_t value_dim,
                                              const kvant_attention_problem *problem, size_t *bytes)
{
    kvant_attention_plan plan;
    latent_source source;
    KVANT_RETURN_IF(!bytes, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(make_plan(rows, value_dim, problem, &source, &plan));
    *bytes = plan.total * sizeof(float);
    return KVANT_OK;
}

kvant_status kvant_latent_attention(const kvant_tensor *rows, uint32_t value_dim,
                                    const kvant_attention_problem *problem, void *workspace,
                                    size_t workspace_bytes)
{
    kvant_attention_plan plan;
    latent_source source;
    KVANT_FORWARD(make_plan(rows, value_dim, problem, &source, &plan));
    return kvant_attention_run(&plan, workspace, workspace_bytes);
}
