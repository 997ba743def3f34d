/* cuda_steps.c - decode steps of a CUDA graph. Only one copy of lengths and slots (next) differs
 * from step to step.
 *
 * kvant_cuda_steps_begin makes each layer's table, as for a call of attention. Steps append
 * their rows to the exact page of each sequence's next block. If a layer has no such page, or
 * has blocks that are open for keys or values alone, begin gathers open blocks and steps append
 * to the gathered pages. The cache does not know of these rows. The caller appends them when no
 * step is left, so that states, transforms and bytes are the same as without steps. */
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/fnv.h"
#include "cuda_attention.h"

typedef struct step_layer {
    cuda_buffer tables, pages;
    call_transforms transforms; /* of blocks; empty: the layer has no tokens */
    uint8_t (*rows)[2];         /* per sequence: the transforms of its new rows, by kvant_role */
} step_layer;

struct cuda_steps {
    uint32_t batch, most, stride; /* sequences; room for sequences; blocks in a row of a table */
    uint32_t n_left, taken;
    int32_t *sequences;
    bool in_place;  /* steps write rows to the plan's pages */
    int32_t *pages; /* the numbers of these pages, per sequence */
    int64_t *state; /* slots as 64 bits, then lengths as 32 bits; on the host */
    cuda_buffer on_device;
    step_layer *layers;
};

static kvant_status no_memory(void)
{
    return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: out of memory for steps");
}

static kvant_status unsupported(const char *why)
{
    return kvant_fail(
        NULL, KVANT_ERR_UNSUPPORTED,
        "cache on cuda: steps cannot begin: %s: use kvant_cache_append and kvant_cache_attend",
        why);
}

/* Memory */

static void free_layers(const kvant_cache *cache, cuda_steps *steps)
{
    for (uint32_t i = 0; steps->layers && i < cache->params.n_layers; i++) {
        kvant_cuda_memory_free(steps->layers[i].tables.at);
        kvant_cuda_memory_free(steps->layers[i].pages.at);
        kvant_free(steps->layers[i].rows);
    }
    kvant_cuda_memory_free(steps->on_device.at);
    kvant_free(steps->layers);
    kvant_free(steps->sequences);
    kvant_free(steps->pages);
    kvant_free(steps->state);
}

void kvant_cuda_steps_destroy(kvant_cache *cache)
{
    cuda_memory *memory = cache->memory;
    if (memory->steps)
        free_layers(cache, memory->steps);
    kvant_free(memory->steps);
    memory->steps = NULL;
}

static kvant_status find_steps(kvant_cache *cache, uint32_t n)
{
    cuda_memory *memory = cache->memory;
    if (memory->steps && memory->steps->most >= n)
        return KVANT_OK;
    kvant_cuda_steps_destroy(cache);
    cuda_steps *steps = memory->steps = kvant_alloc(1, sizeof *steps);
    KVANT_RETURN_IF(!steps, no_memory());
    steps->sequences = kvant_alloc(n, sizeof *steps->sequences);
    steps->pages = kvant_alloc(n, sizeof *steps->pages);
    steps->state = kvant_alloc(2 * (size_t)n, sizeof *steps->state);
    steps->layers = kvant_alloc(cache->params.n_layers, sizeof *steps->layers);
    KVANT_RETURN_IF(!steps->sequences || !steps->pages || !steps->state || !steps->layers,
                    no_memory());
    for (uint32_t i = 0; i < cache->params.n_layers; i++) {
        steps->layers[i].rows = kvant_alloc(n, sizeof *steps->layers[i].rows);
        KVANT_RETURN_IF(!steps->layers[i].rows, no_memory());
    }
    KVANT_FORWARD(kvant_cuda_grow(&steps->on_device, 2 * (size_t)n * sizeof *steps->state,
                                  "allocating steps"));
    steps->most = n; /* set last, when all memory is there; a later begin allocates no more */
    return KVANT_OK;
}

/* Begin */

/* The length of the layers that have tokens. A cache may be used for some layers only. */
static uint32_t length_of(const kvant_cache *cache, const kvant_sequence *s)
{
    uint32_t length = 0;
    for (uint32_t layer = 0; layer < cache->params.n_layers && !length; layer++)
        length = s->lengths[layer];
    return length;
}

static kvant_status check_sequence(const kvant_cache *cache, const kvant_sequence *s)
{
    const uint32_t length = length_of(cache, s);
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++) {
        const cuda_layer *l = kvant_cuda_layer(cache, layer);
        if (!length || (s->lengths[layer] != length && s->lengths[layer]))
            return unsupported(
                "layers of a sequence have different lengths, or no layer has tokens");
        if (!s->lengths[layer])
            continue;
        if (kvant_transforms_pending(l->parts[0].tensor) ||
            kvant_transforms_pending(l->parts[1].tensor))
            return unsupported("centres and scales are still learned from the first 64 tokens");
    }
    const uint32_t last = (length - 1) / KVANT_PAGE_TOKENS;
    return s->table[last] < 0 ? unsupported("the last block was dropped") : KVANT_OK;
}

/* Checks that steps can run in every layer, for all sequences at once. */
static kvant_status check_layers(const kvant_cache *cache, const cuda_steps *steps)
{
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++)
        for (uint32_t i = 1; i < steps->batch; i++) {
            const kvant_sequence *first = &cache->sequences[steps->sequences[0]];
            if (!cache->sequences[steps->sequences[i]].lengths[layer] != !first->lengths[layer])
                return unsupported("a layer has tokens of only some of the sequences");
        }
    return KVANT_OK;
}

/* Adds the blocks that the rows of the steps will need. */
static kvant_status reserve(kvant_cache *cache, cuda_steps *steps)
{
    steps->n_left = KVANT_PAGE_TOKENS;
    for (uint32_t i = 0; i < steps->batch; i++) {
        const kvant_sequence *s = &cache->sequences[steps->sequences[i]];
        KVANT_FORWARD(check_sequence(cache, s));
        const uint32_t length = length_of(cache, s), most = cache->params.max_tokens,
                       room = length < most ? most - length : 1,
                       left = KVANT_PAGE_TOKENS - length % KVANT_PAGE_TOKENS,
                       fewer = left < room ? left : room;
        steps->n_left = fewer < steps->n_left ? fewer : steps->n_left;
    }
    KVANT_FORWARD(check_layers(cache, steps));
    for (uint32_t i = 0; i < steps->batch; i++)
        KVANT_FORWARD(kvant_sequence_reserve(
            cache, steps->sequences[i], length_of(cache, &cache->sequences[steps->sequences[i]]),
            steps->n_left));
    return KVANT_OK;
}

/* Whether keys and values of a layer have the same open blocks of a sequence, and its next block
 * has an exact page. */
static bool fits_in_place(cuda_layer *l, const kvant_sequence *s, uint32_t next)
{
    for (uint32_t i = 0; i < s->n_blocks; i++)
        if (s->table[i] >= 0 && s->table[i] != (int32_t)next &&
            kvant_cuda_page_of(&l->parts[0], (uint32_t)s->table[i]) !=
                kvant_cuda_page_of(&l->parts[1], (uint32_t)s->table[i]))
            return false;
    for (int role = 0; role < 2; role++)
        if (l->parts[role].tensor->blocks[next].open_page >= 0 ||
            kvant_cuda_exact_page_for(&l->parts[role], next, 0) < 0)
            return false;
    return true;
}

/* Finds a page for the next row of each sequence. */
static void place_rows(kvant_cache *cache, cuda_steps *steps)
{
    const cuda_memory *memory = cache->memory;
    for (uint32_t i = 0; i < steps->batch; i++) {
        const kvant_sequence *s = &cache->sequences[steps->sequences[i]];
        const uint32_t length = length_of(cache, s);
        cache->slots[i] = (int64_t)s->table[length / KVANT_PAGE_TOKENS] * KVANT_PAGE_TOKENS +
                          length % KVANT_PAGE_TOKENS;
    }
    kvant_cuda_exact_plan(cache, 0, steps->batch);
    steps->in_place = memory->plan != NULL;
    for (uint32_t i = 0; i < steps->batch && steps->in_place; i++) {
        const kvant_sequence *s = &cache->sequences[steps->sequences[i]];
        const uint32_t next = (uint32_t)(cache->slots[i] / KVANT_PAGE_TOKENS);
        steps->pages[i] = kvant_plan_page(memory->plan, next);
        for (uint32_t layer = 0; layer < cache->params.n_layers && steps->in_place; layer++)
            steps->in_place =
                !s->lengths[layer] || fits_in_place(kvant_cuda_layer(cache, layer), s, next);
    }
}

/* The problem of a step: one query token, whose pointer is not known yet. */
static kvant_attention_problem problem_of(const kvant_cache *cache)
{
    const kvant_cache_params *p = &cache->params;
    return (kvant_attention_problem){ .size = sizeof(kvant_attention_problem),
                                      .n_queries = 1,
                                      .n_heads = p->n_heads,
                                      .q_token_stride = (size_t)p->n_heads * p->head_dim,
                                      .q_head_stride = p->head_dim,
                                      .out_token_stride = (size_t)p->n_heads * p->head_dim,
                                      .out_head_stride = p->head_dim,
                                      .causal = true };
}

static void find_transforms(const attention_call *c, step_layer *layer)
{
    for (uint32_t i = 0; i < c->batch; i++) {
        const uint32_t last = ((uint32_t)c->memory->staging[i] - 1) / KVANT_PAGE_TOKENS;
        for (int role = 0; role < 2; role++)
            layer->rows[i][role] =
                c->layer->parts[role].tensor->blocks[c->blocks[i * c->stride + last]].transform_id;
    }
}

static bool is_dense(const attention_call *c)
{
    return c->transforms.through || c->layer->parts[KVANT_ROLE_V].matrix;
}

/* Allocates what kvant_cuda_call_run needs, so that a step allocates and copies nothing. */
static kvant_status make_room(attention_call *c)
{
    const cuda_part *k = &c->layer->parts[KVANT_ROLE_K], *v = &c->layer->parts[KVANT_ROLE_V];
    const size_t rows = kvant_tensor_width(k->tensor);
    KVANT_FORWARD(kvant_cuda_call_room(c));
    if (!k->matrix && !v->matrix)
        return KVANT_OK;
    return kvant_cuda_grow(&c->memory->rotated, 2 * KVANT_CACHE_BATCH * rows * sizeof(float),
                           "allocating rows");
}

static kvant_status begin_layer(kvant_cache *cache, cuda_steps *steps, uint32_t number,
                                kvant_steps_info *info)
{
    const kvant_attention_problem p = problem_of(cache);
    step_layer *layer = &steps->layers[number];
    layer->transforms = (call_transforms){ 0 };
    if (!cache->sequences[steps->sequences[0]].lengths[number])
        return KVANT_OK;
    attention_call c = kvant_cuda_call_of(cache, number, steps->sequences, steps->batch, &p);
    const uint32_t blocks = kvant_cuda_call_blocks(&c) + 1;
    if (blocks > steps->stride)
        steps->stride = blocks + KVANT_PAGE_TOKENS; /* room for 4096 tokens, with the same graph */
    c.stride = steps->stride;
    c.steps = true;
    c.in_place = steps->in_place ? steps->pages : NULL;
    c.gathered = &layer->pages;
    KVANT_FORWARD(kvant_cuda_call_stage(&c));
    if (kvant_cuda_call_centers_back(&c, KVANT_ROLE_V))
        return unsupported("imported blocks brought values of several centres");
    find_transforms(&c, layer);
    layer->transforms = c.transforms;
    const size_t bytes = kvant_cuda_call_words(&c) * sizeof *c.table;
    KVANT_FORWARD(kvant_cuda_grow(&layer->tables, bytes, "allocating tables"));
    KVANT_FORWARD(kvant_cuda_report_error(
        kvant_cuda_memory_copy(layer->tables.at, c.table, bytes, c.memory->stream),
        "copying tables"));
    info->floats |= is_dense(&c);
    return make_room(&c);
}

/* Hashes which transforms have matrices, and their addresses. A transform id may have been given to
 * another transform since the graph was captured. */
static uint64_t fingerprint_matrices(cuda_layer *l, const step_layer *layer, uint64_t state)
{
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS && layer->transforms.through; v++) {
        const bool used = layer->transforms.used[KVANT_ROLE_K] >> v & 1;
        bool compact;
        const void *at =
            used ? kvant_cuda_query_matrix(&l->parts[KVANT_ROLE_K], v, &compact) : NULL;
        state = kvant_fnv1a(state, &at, sizeof at);
    }
    return state;
}

/* Hashes everything that a captured graph holds by value. */
static uint64_t fingerprint(const kvant_cache *cache, const cuda_steps *steps)
{
    const cuda_memory *memory = cache->memory;
    const void *at[] = { memory->queries.at, memory->rotated.at, memory->matrix.at,
                         steps->on_device.at };
    const uint32_t sizes[] = { steps->batch, steps->stride, steps->in_place };
    uint64_t state = kvant_fnv1a(kvant_fnv1a(KVANT_FNV_START, at, sizeof at), sizes, sizeof sizes);
    for (uint32_t i = 0; i < cache->params.n_layers; i++) {
        const step_layer *layer = &steps->layers[i];
        const void *own[] = { layer->tables.at, layer->pages.at };
        if (!layer->transforms.used[KVANT_ROLE_K])
            continue;
        state = kvant_fnv1a(kvant_fnv1a(state, own, sizeof own), layer->transforms.used,
                            sizeof layer->transforms.used);
        state = kvant_fnv1a(state, layer->rows, steps->batch * sizeof *layer->rows);
        state = fingerprint_matrices(kvant_cuda_layer(cache, i), layer, state);
    }
    return state;
}

static void find_state(const kvant_cache *cache, cuda_steps *steps)
{
    int32_t *lengths = (int32_t *)(steps->state + steps->batch);
    for (uint32_t i = 0; i < steps->batch; i++) {
        const kvant_sequence *s = &cache->sequences[steps->sequences[i]];
        uint32_t dropped = 0;
        while (s->table[dropped] < 0)
            dropped++;
        lengths[i] = (int32_t)(length_of(cache, s) - dropped * KVANT_PAGE_TOKENS);
        steps->state[i] =
            (int64_t)(steps->in_place ? steps->pages[i] : (int32_t)i) * KVANT_PAGE_TOKENS +
            lengths[i] % (int32_t)KVANT_PAGE_TOKENS - 1;
    }
}

kvant_status kvant_cuda_steps_begin(kvant_cache *cache, const int32_t *sequences, uint32_t n,
                                    kvant_steps_info *info)
{
    cuda_memory *memory = cache->memory;
    if (cache->params.n_heads % cache->params.n_kv_heads || n > KVANT_CACHE_BATCH)
        return unsupported("more than 512 sequences");
    KVANT_FORWARD(kvant_cuda_refused(memory));
    KVANT_FORWARD(find_steps(cache, n));
    cuda_steps *steps = memory->steps;
    steps->batch = n;
    steps->n_left = steps->taken = 0;
    memcpy(steps->sequences, sequences, n * sizeof *sequences);
    kvant_status status = reserve(cache, steps);
    if (status == KVANT_OK)
        place_rows(cache, steps);
    for (uint32_t i = 0; i < cache->params.n_layers && status == KVANT_OK; i++)
        status = begin_layer(cache, steps, i, info);
    if (status != KVANT_OK) {
        steps->n_left = 0;
        return status;
    }
    find_state(cache, steps);
    info->n_steps = steps->n_left;
    info->graph = fingerprint(cache, steps);
    return kvant_cuda_report_error(memory->status, memory->failed);
}

/* Steps */

kvant_status kvant_cuda_steps_next(kvant_cache *cache)
{
    cuda_memory *memory = cache->memory;
    cuda_steps *steps = memory->steps;
    KVANT_FORWARD(kvant_cuda_refused(memory));
    if (!steps || steps->taken == steps->n_left)
        return kvant_fail(
            NULL, KVANT_ERR_ARGUMENT,
            "steps: all steps are used: append the rows, then call kvant_steps_begin again");
    int32_t *lengths = (int32_t *)(steps->state + steps->batch);
    for (uint32_t i = 0; i < steps->batch; i++) {
        steps->state[i]++;
        lengths[i]++;
    }
    steps->taken++;
    return kvant_cuda_report_error(
        kvant_cuda_memory_copy(steps->on_device.at, steps->state,
                               steps->batch * (sizeof *steps->state + sizeof *lengths),
                               memory->stream),
        "copying steps");
}

/* Appends the rows of sequences first to first + n - 1, which have the same transform. */
static kvant_status append_rows(const attention_call *c, const kvant_step *step, uint32_t first,
                                uint32_t n)
{
    const cuda_steps *steps = c->memory->steps;
    const step_layer *layer = &steps->layers[c->number];
    const size_t width = kvant_tensor_width(c->layer->parts[0].tensor),
                 offset = first * width *
                          (step->type == KVANT_CUDA_F32 ? sizeof(float) : sizeof(uint16_t));
    kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                           .type = (kvant_cuda_type)step->type,
                                           .n_tokens = n,
                                           .n_kv_heads = c->n_kv_heads,
                                           .slots = (const int64_t *)steps->on_device.at + first,
                                           .refused = c->memory->refused };
    for (int role = 0; role < 2; role++) {
        cuda_append a = { .part = &c->layer->parts[role],
                          .stride = width,
                          .n = n,
                          .transform_id = layer->rows[first][role],
                          .open = true };
        a.rows = (const float *)((const char *)(role == KVANT_ROLE_K ? step->k : step->v) + offset);
        kvant_cuda_rows *rows = role == KVANT_ROLE_K ? &args.k : &args.v;
        kvant_cuda_add_rows(&a, &args);
        rows->pages =
            steps->in_place ? kvant_cuda_exact_pages(a.part) : kvant_cuda_call_pages(c, role);
        if (kvant_cuda_rotates(a.part, a.transform_id)) { /* rotated already: needs its own call */
            kvant_cuda_kernel_append_args alone = args;
            alone.transformed = 1;
            alone.k_compact = NULL;
            *(role == KVANT_ROLE_K ? &alone.v : &alone.k) = (kvant_cuda_rows){ 0 };
            KVANT_FORWARD(kvant_cuda_report_error(
                kvant_cuda_kernel_append(&alone, c->memory->stream), "copying steps"));
            *rows = (kvant_cuda_rows){ 0 };
        }
    }
    return args.k.codec || args.v.codec
               ? kvant_cuda_report_error(kvant_cuda_kernel_append(&args, c->memory->stream),
                                         "copying steps")
               : KVANT_OK;
}

static kvant_status append_all(const attention_call *c, const kvant_step *step)
{
    const step_layer *layer = &c->memory->steps->layers[c->number];
    for (uint32_t first = 0, end; first < c->batch; first = end) {
        end = first + 1;
        while (end < c->batch &&
               memcmp(layer->rows[end], layer->rows[first], sizeof *layer->rows) == 0)
            end++;
        KVANT_FORWARD(append_rows(c, step, first, end - first));
    }
    return KVANT_OK;
}

static attention_call call_of(kvant_cache *cache, uint32_t number, const kvant_step *step,
                              const kvant_attention_problem *p)
{
    const cuda_steps *steps = ((cuda_memory *)cache->memory)->steps;
    step_layer *layer = &steps->layers[number];
    attention_call c = kvant_cuda_call_of(cache, number, steps->sequences, steps->batch, p);
    c.stride = steps->stride;
    c.n_blocks = steps->batch * steps->stride;
    c.n_gathered = steps->in_place ? 0 : steps->batch;
    c.gathered = &layer->pages;
    c.any_open = c.steps = true;
    c.transforms = layer->transforms;
    c.on_device = layer->tables.at;
    c.lengths = (const int32_t *)((const int64_t *)steps->on_device.at + steps->batch);
    c.type = (kvant_cuda_type)step->type;
    return c;
}

static kvant_status run(attention_call *c, const kvant_step *step)
{
    if (kvant_cuda_call_centers_back(c, KVANT_ROLE_K))
        return unsupported("keys have a centre and scores have a softcap");
    if (step->type != KVANT_CUDA_F32 && is_dense(c))
        return kvant_fail(
            NULL, KVANT_ERR_ARGUMENT,
            "steps: type must be KVANT_CUDA_F32 here, as floats of kvant_steps_info says");
    KVANT_FORWARD(append_all(c, step));
    return kvant_cuda_call_run(c);
}

kvant_status kvant_cuda_step(kvant_cache *cache, uint32_t layer, const kvant_step *step)
{
    cuda_memory *memory = cache->memory;
    const kvant_cuda_stream stream = memory->stream;
    if (!memory->steps || !memory->steps->n_left ||
        !memory->steps->layers[layer].transforms.used[KVANT_ROLE_K])
        return kvant_fail(
            NULL, KVANT_ERR_ARGUMENT,
            "steps: no steps are left, or the layer takes no part in them: call kvant_steps_begin");
    kvant_attention_problem p = problem_of(cache);
    p.q = step->q, p.out = step->out, p.window = step->window, p.scale = step->scale;
    p.logit_softcap = step->logit_softcap, p.sinks = step->sinks;
    attention_call c = call_of(cache, layer, step, &p);
    memory->stream = step->stream;
    const kvant_status status = run(&c, step);
    memory->stream = stream;
    return status;
}
