/* test_random_slots.c - the tensors of two layers as an engine uses them. Sequences share
 * slots, and random calls write, remove, share, shift, copy, save and restore tokens.
 *
 * A model in the test knows the token, the position and the sequences of every slot. After each
 * call the rows of slots must be their tokens' rows, rotated to their positions, up to the error of
 * the codec. Attention with a mask must be what double precision computes from the rows that the
 * tensors read back.
 *
 * KVANT_RANDOM_SEEDS: the number of seeds; KVANT_RANDOM_SEED: the first. */
#include "attend.h"
#include "rotated_text.h"

enum { LAYERS = 2, N_BLOCKS = 24, N_SLOTS = N_BLOCKS * 64, MOST_SEQUENCES = 32, CALLS = 70 };

typedef struct config {
    const char *k, *v;
    double most_error; /* largest squared error of a row, as a part of its squared norm */
    bool exact, centers;
} config;

static const config configs[] = {
    { "turboquant-6:transform=first", "trellis-4:center=first", 0.1, true, true },
    { "trellis-4:transform=first", "trellis-4", 0.2, true, true },
    { "trellis-3:transform=first", "trellis-3", 0.4, true, true },
    { "trellis-2:transform=first", "trellis-2:transform=first", 1, true, true },
    { "int-4:axis=channel,group=32,recent=100,sink=4", "int-4", 0.2, false, false },
    { "f32", "f32", 1e-6, false, false },
    { "trellis-4:center=first,norm=first", "turboquant-4", 0.2, true, false },
};

typedef struct cell {
    uint32_t sequences; /* a bit each */
    int32_t position;
    uint32_t token;
} cell;

typedef struct run {
    const config *config;
    const layout *layout;
    text *text;
    fixture k[LAYERS], v[LAYERS];
    kvant_step_pages steps[2];
    cell cells[N_SLOTS];
    uint32_t next_token, at, n_sequences;
    uint64_t rng, seed;
    const char *what;
} run;

static uint32_t below(run *r, uint32_t n)
{
    return n ? (uint32_t)(test_random(&r->rng) % n) : 0;
}

static void fail_run(const run *r, const char *what)
{
    fail_msg("seed %llu, call %u (%s), %s: %s", (unsigned long long)r->seed, (unsigned)r->at,
             r->what, r->config->k, what);
}

static void check_status(const run *r, kvant_status got, kvant_status want)
{
    if (got != want) {
        print_message("status %d, not %d: %s\n", (int)got, (int)want, kvant_error_message());
        fail_run(r, "status");
    }
}

/* Rows */

static uint32_t token_of(uint32_t token, uint32_t layer)
{
    return (token * LAYERS + layer) % MOST;
}

static void key_of(const run *r, const cell *c, uint32_t layer, float *row)
{
    const uint32_t token = token_of(c->token, layer);
    for (uint32_t h = 0; h < N_KV_HEADS; h++) {
        double x[HEAD_DIM];
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            x[j] = r->text->rows[(size_t)token * WIDTH + h * HEAD_DIM + j];
        rotate_by_rope(r->layout, (double)c->position - token, x);
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            row[h * HEAD_DIM + j] = (float)x[j];
    }
}

static void value_of(const cell *c, uint32_t layer, float *row)
{
    uint64_t rng = ((uint64_t)c->token * LAYERS + layer) * 0x9e3779b97f4a7c15u + 5;
    test_random(&rng);
    fill_normal(row, WIDTH, &rng);
}

static void check_row(run *r, const fixture *f, uint32_t slot, const float *want)
{
    float got[WIDTH];
    read_slot(f, slot, got);
    for (uint32_t h = 0; h < N_KV_HEADS; h++) {
        const double error = squared_distance(got + h * HEAD_DIM, want + h * HEAD_DIM, HEAD_DIM),
                     size = squared_distance(want + h * HEAD_DIM, (float[HEAD_DIM]){ 0 }, HEAD_DIM);
        if (!(error <= r->config->most_error * size)) {
            print_message("slot %u, head %u: error %.4f\n", slot, h, error / size);
            fail_run(r, "a row is not the slot's");
        }
    }
}

static void check_rows(run *r)
{
    float want[WIDTH];
    for (uint32_t slot = below(r, 3); slot < N_SLOTS; slot += 3) {
        const cell *c = &r->cells[slot];
        const uint32_t layer = below(r, LAYERS);
        if (!c->sequences)
            continue;
        key_of(r, c, layer, want);
        check_row(r, &r->k[layer], slot, want);
        value_of(c, layer, want);
        check_row(r, &r->v[layer], slot, want);
    }
}

/* Attention of queries of several sequences in one batch, as llama.cpp has them. */
static void check_batch(run *r)
{
    static float q[MAX_QUERIES * N_HEADS * HEAD_DIM];
    static uint16_t mask[MAX_QUERIES * N_SLOTS];
    static attended got;
    static const uint32_t most[] = { 1, 2, 9, 40 };
    const uint32_t n = 1 + below(r, most[below(r, 4)]), layer = below(r, LAYERS);
    uint32_t end = 0;
    for (uint32_t slot = 0; slot < N_SLOTS; slot++)
        end = r->cells[slot].sequences ? slot + 1 : end;
    end = (end + 63) / 64 * 64;
    for (uint32_t t = 0; t < n; t++) {
        const uint32_t s = below(r, r->n_sequences);
        const int32_t position = (int32_t)below(r, 4 * N_SLOTS);
        for (uint32_t slot = 0; slot < end; slot++) {
            const cell *c = &r->cells[slot];
            mask[(size_t)t * end + slot] =
                c->sequences >> s & 1 && c->position <= position ? 0 : 0xfc00;
        }
    }
    fill_normal(q, COUNT(q), &r->rng);
    kvant_attention_problem p = { .n_queries = n,
                                  .n_tokens = end,
                                  .mask = mask,
                                  .mask_token_stride = end,
                                  .scale = 0.1f,
                                  .n_threads = 1 + below(r, 3),
                                  .logit_softcap = below(r, 4) ? 0 : 20,
                                  .exact = true };
    check_status(r, attend(&r->k[layer], &r->v[layer], &p, q, &got), KVANT_OK);
    check_attended(&r->k[layer], &r->v[layer], &p, &got, 1e-3);
}

/* Sequences */

static int32_t end_of(const run *r, uint32_t s)
{
    int32_t end = 0;
    for (uint32_t slot = 0; slot < N_SLOTS; slot++)
        if (r->cells[slot].sequences >> s & 1 && r->cells[slot].position >= end)
            end = r->cells[slot].position + 1;
    return end;
}

/* Finds n free slots from a random one on, or the lowest ones, in order. */
static bool find_slots(run *r, uint32_t n, int64_t *slots)
{
    const uint32_t from = below(r, 3) ? 0 : below(r, N_SLOTS);
    uint32_t found = 0;
    for (uint32_t i = 0; i < N_SLOTS && found < n; i++)
        if (!r->cells[(from + i) % N_SLOTS].sequences)
            slots[found++] = (from + i) % N_SLOTS;
    return found == n;
}

static void write_layer(run *r, const int64_t *slots, uint32_t n, uint32_t layer)
{
    float *k = malloc((size_t)n * WIDTH * sizeof *k), *v = malloc((size_t)n * WIDTH * sizeof *v);
    int32_t *positions = malloc(n * sizeof *positions);
    const bool refused = below(r, 10) == 0;
    for (uint32_t i = 0; i < n; i++) {
        const cell *c = &r->cells[slots[i]];
        key_of(r, c, layer, k + (size_t)i * WIDTH);
        value_of(c, layer, v + (size_t)i * WIDTH);
        positions[i] = c->position;
    }
    if (below(r, 2)) {
        float *q = malloc((size_t)n * TEXT_HEADS * HEAD_DIM * sizeof *q);
        fill_normal(q, (size_t)n * TEXT_HEADS * HEAD_DIM, &r->rng);
        const kvant_queries queries = { .size = sizeof queries,
                                        .q = q,
                                        .token_stride = (size_t)TEXT_HEADS * HEAD_DIM,
                                        .head_stride = HEAD_DIM,
                                        .n_tokens = n,
                                        .n_heads = TEXT_HEADS,
                                        .positions = positions };
        check_status(r, kvant_tensor_note_queries(r->k[layer].tensor, &queries, 2), KVANT_OK);
        free(q);
    }
    for (int again = refused; again >= 0; again--) {
        float *at = (below(r, 2) ? k : v) + below(r, n * WIDTH), kept = *at;
        if (again)
            *at = NAN;
        check_status(r, kvant_tensor_next_positions(r->k[layer].tensor, positions, n), KVANT_OK);
        check_status(r,
                     kvant_tensor_write_layer(r->k[layer].tensor, r->v[layer].tensor, slots, n, k,
                                              WIDTH, v, WIDTH, 1 + below(r, 3)),
                     again ? KVANT_ERR_NONFINITE : KVANT_OK);
        *at = kept;
        if (again) {
            /* the slots are free still; other slots hold their rows */
            cell kept_cells[N_SLOTS];
            memcpy(kept_cells, r->cells, sizeof kept_cells);
            for (uint32_t i = 0; i < n; i++)
                r->cells[slots[i]].sequences = 0;
            check_rows(r);
            memcpy(r->cells, kept_cells, sizeof kept_cells);
        }
    }
    free(k);
    free(v);
    free(positions);
}

static void store(run *r, const int64_t *slots, uint32_t n)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        write_layer(r, slots, n, layer);
}

static void grow(run *r, uint32_t s)
{
    static const uint32_t most[] = { 1, 1, 1, 5, 40, 64, 100, 300 };
    int64_t slots[512];
    const uint32_t n = 1 + below(r, most[below(r, COUNT(most))]);
    int32_t end = end_of(r, s);
    if (!find_slots(r, n, slots))
        return;
    for (uint32_t i = 0; i < n; i++)
        r->cells[slots[i]] = (cell){ 1u << s, end++, r->next_token++ };
    store(r, slots, n);
}

static void grow_many(run *r, uint32_t s)
{
    int64_t slots[MOST_SEQUENCES];
    (void)s;
    if (!find_slots(r, r->n_sequences, slots))
        return;
    for (uint32_t i = 0; i < r->n_sequences; i++)
        r->cells[slots[i]] = (cell){ 1u << i, end_of(r, i), r->next_token++ };
    store(r, slots, r->n_sequences);
}

static void cut(run *r, uint32_t s)
{
    const uint32_t end = (uint32_t)end_of(r, s);
    const int32_t first = (int32_t)below(r, end + 1),
                  last = below(r, 2) ? INT32_MAX : first + (int32_t)below(r, 100);
    for (uint32_t slot = 0; slot < N_SLOTS; slot++)
        if (r->cells[slot].position >= first && r->cells[slot].position < last)
            r->cells[slot].sequences &= ~(1u << s);
}

static void forget(run *r, uint32_t s)
{
    for (uint32_t slot = 0; slot < N_SLOTS; slot++)
        r->cells[slot].sequences &= ~(1u << s);
}

static void share(run *r, uint32_t s)
{
    const uint32_t to = below(r, r->n_sequences);
    const int32_t end = (int32_t)below(r, (uint32_t)end_of(r, s) + 1);
    if (to == s)
        return;
    forget(r, to);
    for (uint32_t slot = 0; slot < N_SLOTS; slot++)
        if (r->cells[slot].sequences >> s & 1 && r->cells[slot].position < end)
            r->cells[slot].sequences |= 1u << to;
}

static void shift(run *r, uint32_t s)
{
    int32_t by[N_SLOTS] = { 0 };
    const int32_t first = (int32_t)below(r, (uint32_t)end_of(r, s) + 1),
                  moved = below(r, 3) ? -(int32_t)below(r, (uint32_t)first + 1)
                                      : (int32_t)below(r, 300);
    const kvant_rope rope = rope_of(r->layout, 0, 0);
    for (uint32_t slot = 0; slot < N_SLOTS; slot++) {
        cell *c = &r->cells[slot];
        if (!c->sequences)
            by[slot] = below(r, 2) ? KVANT_ANY_SHIFT : 0;
        else if (c->sequences >> s & 1 && c->position >= first) {
            by[slot] = moved;
            c->position += moved;
        }
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        check_status(r, kvant_tensor_shift(r->k[layer].tensor, &rope, by, N_SLOTS, 1 + below(r, 2)),
                     KVANT_OK);
}

static bool is_free(const run *r, uint32_t block)
{
    for (uint32_t i = 0; i < 64; i++)
        if (r->cells[block * 64 + i].sequences)
            return false;
    return true;
}

/* How many of n blocks are free. */
static uint32_t are_free(const run *r, uint32_t first, uint32_t n)
{
    uint32_t n_free = 0;
    for (uint32_t i = 0; i < n; i++)
        n_free += is_free(r, first + i);
    return n_free;
}

static void clear(run *r, uint32_t s)
{
    (void)s;
    for (uint32_t block = 0; block < N_BLOCKS; block++)
        for (uint32_t layer = 0; layer < LAYERS && is_free(r, block); layer++) {
            kvant_tensor_clear_blocks(r->k[layer].tensor, block, 1);
            kvant_tensor_clear_blocks(r->v[layer].tensor, block, 1);
        }
}

/* Copies blocks to free blocks. A sequence without tokens gets the tokens of the copies. */
static void copy(run *r, uint32_t s)
{
    uint32_t n, from, to, tries = 0;
    forget(r, s);
    do {
        n = 1 + below(r, 3);
        from = below(r, N_BLOCKS - n);
        to = below(r, N_BLOCKS - n);
        if (tries++ == 50)
            return;
    } while ((from < to + n && to < from + n) || are_free(r, from, n) != 0 ||
             are_free(r, to, n) != n);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        check_status(r, kvant_tensor_copy(r->k[layer].tensor, from, r->k[layer].tensor, to, n),
                     KVANT_OK);
        check_status(r, kvant_tensor_copy(r->v[layer].tensor, from, r->v[layer].tensor, to, n),
                     KVANT_OK);
    }
    for (uint32_t i = 0; i < n * 64; i++) {
        r->cells[to * 64 + i] = r->cells[from * 64 + i];
        if (r->cells[to * 64 + i].sequences)
            r->cells[to * 64 + i].sequences = 1u << s;
    }
}

static void move_record(run *r, const fixture *f, const kvant_block_slots *from,
                        const kvant_block_slots *to, uint32_t n)
{
    size_t bytes;
    check_status(r, kvant_tensor_record_size(f->tensor, from, n, &bytes), KVANT_OK);
    void *data = malloc(bytes);
    check_status(r, kvant_tensor_export_record(f->tensor, from, n, data, bytes, 2), KVANT_OK);
    check_status(r, kvant_tensor_import_record(f->tensor, to, n, data, bytes, 2), KVANT_OK);
    free(data);
}

/* Saves a sequence's tokens, removes them, and restores them in free blocks. */
static void save(run *r, uint32_t s)
{
    kvant_block_slots from[N_BLOCKS], to[N_BLOCKS];
    uint32_t n = 0, n_free = 0;
    for (uint32_t block = 0; block < N_BLOCKS; block++) {
        uint64_t slots = 0;
        for (uint32_t i = 0; i < 64; i++)
            slots |= (uint64_t)(r->cells[block * 64 + i].sequences >> s & 1) << i;
        if (slots)
            from[n++] = (kvant_block_slots){ slots, block };
    }
    for (uint32_t block = below(r, N_BLOCKS); block < N_BLOCKS && n_free < n; block++)
        if (is_free(r, block))
            to[n_free] = (kvant_block_slots){ from[n_free].slots, block }, n_free++;
    if (!n || n_free < n)
        return;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        move_record(r, &r->k[layer], from, to, n);
        move_record(r, &r->v[layer], from, to, n);
    }
    for (uint32_t b = 0; b < n; b++)
        for (uint32_t i = 0; i < 64; i++)
            if (from[b].slots >> i & 1) {
                cell *c = &r->cells[from[b].block * 64 + i];
                r->cells[to[b].block * 64 + i] = *c;
                r->cells[to[b].block * 64 + i].sequences = 1u << s;
                c->sequences &= ~(1u << s);
            }
}

static const struct {
    const char *name;
    void (*act)(run *, uint32_t);
    uint32_t weight;
} calls[] = {
    { "write", grow, 8 },  { "write of all", grow_many, 5 },
    { "remove", cut, 3 },  { "forget", forget, 1 },
    { "share", share, 3 }, { "shift", shift, 4 },
    { "clear", clear, 2 }, { "copy", copy, 3 },
    { "save", save, 3 },
};

static void call(run *r)
{
    uint32_t total = 0, which = 0;
    for (size_t i = 0; i < COUNT(calls); i++)
        total += calls[i].weight;
    for (uint32_t at = below(r, total); at >= calls[which].weight; which++)
        at -= calls[which].weight;
    r->what = calls[which].name;
    calls[which].act(r, below(r, r->n_sequences));
    check_rows(r);
    check_batch(r);
}

static fixture make_side(run *r, const char *of, kvant_role role)
{
    static const kvant_exact_part part = {
        .size = sizeof part, .first = 64, .newest = 128, .total = 192, .step = 256
    };
    fixture f = make_heads(of, of, role, 1, N_BLOCKS, 0), g = f;
    if (!r->config->exact)
        return f;
    kvant_tensor_free(&f.tensor);
    free(f.memory);
    free(f.rows);
    g.params.exact = &part;
    g.params.steps = &r->steps[role];
    make_tensor(&g);
    return g;
}

static void begin(run *r)
{
    uint64_t seed = r->seed * 7 + 3;
    r->text = malloc(sizeof *r->text);
    fill(r->layout, 1, N_KV_HEADS, &seed, r->text->rows);
    for (int i = 0; i < 2; i++) {
        const size_t bytes = 4 * 64 * WIDTH * 2;
        void *memory = aligned(bytes);
        r->steps[i] = (kvant_step_pages){ sizeof *r->steps, memory, bytes, NULL };
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        kvant_rope rope = rope_of(r->layout, 4 * N_SLOTS, 0);
        rope.block_centers = r->config->centers;
        r->k[layer] = make_side(r, r->config->k, KVANT_ROLE_K);
        r->v[layer] = make_side(r, r->config->v, KVANT_ROLE_V);
        check_status(r, kvant_tensor_set_rope(r->k[layer].tensor, &rope), KVANT_OK);
    }
}

static void run_seed(uint64_t seed)
{
    static run r;
    static const uint32_t numbers[] = { 1, 2, 6, MOST_SEQUENCES };
    r = (run){ .config = &configs[seed % COUNT(configs)],
               .layout = &layouts()[seed / COUNT(configs) % 4],
               .seed = seed,
               .rng = seed * 0x9e3779b97f4a7c15u,
               .what = "create" };
    r.n_sequences = numbers[below(&r, COUNT(numbers))];
    begin(&r);
    for (r.at = 0; r.at < CALLS; r.at++)
        call(&r);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        drop(&r.k[layer]);
        drop(&r.v[layer]);
    }
    for (int i = 0; i < 2; i++)
        free(r.steps[i].memory);
    free(r.text);
}

CASE(slots_hold_their_rows)
{
    const char *n = getenv("KVANT_RANDOM_SEEDS"), *first = getenv("KVANT_RANDOM_SEED");
    const uint64_t seed = first ? strtoull(first, NULL, 10) : 1;
    for (uint64_t i = 0; i < (n ? strtoull(n, NULL, 10) : COUNT(configs)); i++)
        run_seed(seed + i);
}

RUN_CASES(NULL, NULL)
