/* attention_setup.c - see attention_setup.h. */
#include "attention_setup.h"

#include "../../src/codec/codec_internal.h"

static void fill_tensor(const setup *s, kvant_tensor *tensor, uint32_t blocks, uint32_t dim,
                        uint64_t *rng)
{
    uint32_t n = s->n_sequences * s->n_tokens, width = s->n_kv_heads * dim;
    int64_t *slots = malloc(n * sizeof *slots);
    float *rows = malloc((size_t)n * width * sizeof *rows),
          *center = malloc(width * sizeof *center);
    fill_normal(center, width, rng);
    fill_normal(rows, (size_t)n * width, rng);
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = i / s->n_tokens * blocks * 64 + i % s->n_tokens;
        for (uint32_t j = 0; j < width; j++)
            rows[(size_t)i * width + j] += s->centred ? 0 : 3 * center[j];
    }
    assert_int_equal(kvant_tensor_write(tensor, slots, n, rows, width, 2), KVANT_OK);
    free(slots);
    free(rows);
    free(center);
}

static kvant_tensor *make_tensor(const setup *s, const char *spec, uint32_t dim, kvant_role role,
                                 kvant_codec **codecs, void **memory)
{
    const kvant_codec *array[MAX_KV_HEADS];
    for (uint32_t h = 0; h < s->n_kv_heads; h++) {
        if (h == 0 || s->codec_per_head)
            assert_ok(kvant_codec_create(spec, dim, role, TEST_SEED + h, &codecs[h], NULL, 0));
        array[h] = s->codec_per_head ? codecs[h] : codecs[0];
    }
    uint32_t blocks = (s->n_tokens + 63) / 64;
    const kvant_tensor_params params = { .size = sizeof params,
                                         .codecs = array,
                                         .n_kv_heads = s->n_kv_heads,
                                         .n_sequences = s->n_sequences,
                                         .n_blocks = s->n_sequences * blocks,
                                         .blocks_per_sequence = blocks };
    size_t bytes;
    assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
    *memory = aligned(bytes);
    kvant_tensor *tensor;
    assert_int_equal(kvant_tensor_create(&params, *memory, &tensor), KVANT_OK);
    return tensor;
}

fixture make_fixture(setup s)
{
    uint64_t rng = 99;
    if (!s.n_sequences)
        s.n_sequences = 1;
    fixture f = { .s = s, .blocks = (s.n_tokens + 63) / 64 };
    f.k = make_tensor(&s, s.k_spec, s.k_dim, KVANT_ROLE_K, f.k_codecs, &f.k_memory);
    f.v = make_tensor(&s, s.v_spec, s.v_dim, KVANT_ROLE_V, f.v_codecs, &f.v_memory);
    fill_tensor(&s, f.k, f.blocks, s.k_dim, &rng);
    fill_tensor(&s, f.v, f.blocks, s.v_dim, &rng);
    f.problem = (kvant_attention_problem){ .first_block = (s.n_sequences - 1) * f.blocks,
                                           .exact = s.exact,
                                           .n_tokens = s.n_tokens,
                                           .n_queries = s.n_queries,
                                           .n_heads = s.n_heads,
                                           .logit_softcap = s.softcap,
                                           .max_bias = s.max_bias };
    f.data = make_data(&f.problem, s.k_dim, s.v_dim, s.mask, s.sinks, &rng);
    return f;
}

void free_fixture(fixture *f)
{
    kvant_tensor_free(&f->k);
    kvant_tensor_free(&f->v);
    for (uint32_t h = 0; h < MAX_KV_HEADS; h++) {
        kvant_codec_free(&f->k_codecs[h]);
        kvant_codec_free(&f->v_codecs[h]);
    }
    free(f->k_memory);
    free(f->v_memory);
    free_data(&f->data);
}

void run(fixture *f)
{
    size_t bytes;
    assert_int_equal(kvant_attention_workspace(f->k, f->v, &f->problem, &bytes), KVANT_OK);
    void *workspace = aligned(bytes);
    memset(workspace, 0xff, bytes);
    for (size_t i = 0; i < (size_t)f->s.n_queries * f->s.n_heads * f->s.v_dim; i++)
        f->data.out[i] = NAN;
    assert_int_equal(kvant_attention(f->k, f->v, &f->problem, workspace, bytes), KVANT_OK);
    free(workspace);
}

/* Sums that the error bound of an output row is made of. */
typedef struct sizes {
    double magnitude; /* sum of |weight x value| over tokens and channels */
    double spread;    /* sum of weight x Euclidean length of (value - output) */
    double peaks;     /* sum over pages of the page's largest weight */
    double longest;   /* length of the longest value */
} sizes;

static double length(const float *value, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)value[i] * value[i];
    return sqrt(sum);
}

/* Sums every fourth term separately, so that the CPU need not wait for the previous addition. */
static void distances(const float *value, const double *out, uint32_t n, double *distance,
                      double *magnitude)
{
    double squares[4] = { 0 }, sums[4] = { 0 };
    for (uint32_t i = 0; i < n; i++) {
        squares[i % 4] += (value[i] - out[i]) * (value[i] - out[i]);
        sums[i % 4] += fabs(value[i]);
    }
    *distance = sqrt(squares[0] + squares[1] + squares[2] + squares[3]);
    *magnitude = sums[0] + sums[1] + sums[2] + sums[3];
}

static sizes measure(const setup *s, const float *values, const double *weights, double total,
                     const double *out)
{
    sizes m = { 0 };
    double peak = 0;
    for (uint32_t j = 0; j < s->n_tokens && total > 0; j++) {
        const float *value = values + (size_t)j * s->n_kv_heads * s->v_dim;
        double away, size;
        distances(value, out, s->v_dim, &away, &size);
        m.magnitude += weights[j] * size / total;
        m.spread += weights[j] * away / total;
        peak = j % 64 ? fmax(peak, weights[j]) : weights[j];
        if (j % 64 == 63 || j + 1 == s->n_tokens)
            m.peaks += peak / total;
    }
    return m;
}

/* One output row in double from the decoded cache. */
static void reference(const fixture *f, const float *keys, const float *values, double longest,
                      uint32_t token, uint32_t head, double *out, sizes *size)
{
    const setup *s = &f->s;
    uint32_t kv = head / (s->n_heads / s->n_kv_heads);
    const float *head_values = values + (size_t)kv * s->v_dim;
    double *weights = malloc(s->n_tokens * sizeof *weights);
    const reference_row cells = { .keys = keys + (size_t)kv * s->k_dim,
                                  .values = head_values,
                                  .key_stride = (size_t)s->n_kv_heads * s->k_dim,
                                  .value_stride = (size_t)s->n_kv_heads * s->v_dim };
    double total = data_row(&f->data, &f->problem, token, head, cells, weights, out);
    *size = measure(s, head_values, weights, total, out);
    size->longest = longest;
    free(weights);
}

/* Bound on |out - reference|. A score errs by at most about (k_dim + 20) 2^-24 of sum |q k| scale.
 * The errors come from the dot product, from the rotations of query and keys (log2 steps each) and
 * from some products. This sum is at most |q| |k| scale. The error multiplies a weight by its
 * exponential. The sum over values adds (tokens in a split + 20) 2^-24. All errors are relative to
 * the sum of |weight value|.
 *
 * With scales, a query (or an output) grows by up to the largest scale, and keys (or values) grow
 * by up to 1 / the smallest scale. A row minus its centre is at most twice as long as the longest
 * row, because the centre is a mean. */
static double growth(const kvant_tensor *tensor, uint32_t n_kv_heads, uint32_t dim)
{
    float smallest = INFINITY, largest = 0;
    kvant_tensor_info info = { .size = sizeof info };
    double centre = 1;
    assert_int_equal(kvant_tensor_get_info(tensor, &info), KVANT_OK);
    for (uint32_t i = 0; i < info.n_blocks * n_kv_heads; i++) {
        kvant_block_info block = { .size = sizeof block };
        assert_ok(kvant_tensor_get_block(tensor, i / n_kv_heads, i % n_kv_heads, &block));
        if (block.affine.center)
            centre = 2;
        for (uint32_t j = 0; j < dim; j++) {
            smallest = fminf(smallest, block.affine.scale ? block.affine.scale[j] : 1);
            largest = fmaxf(largest, block.affine.scale ? block.affine.scale[j] : 1);
        }
    }
    return largest / smallest * centre;
}

/* The largest |q| |k| scale, multiplied by growth(). */
static double largest_score(const fixture *f, const float *keys)
{
    const setup *s = &f->s;
    double q = 0, k = 0;
    for (uint32_t t = 0; t < s->n_queries * s->n_heads; t++)
        q = fmax(q, length(f->data.q + (size_t)t * s->k_dim, s->k_dim));
    for (uint32_t t = 0; t < s->n_tokens * s->n_kv_heads; t++)
        k = fmax(k, length(keys + (size_t)t * s->k_dim, s->k_dim));
    return q * k * f->problem.scale * growth(f->k, s->n_kv_heads, s->k_dim);
}

static double rounding(const fixture *f, double score, const sizes *size)
{
    const setup *s = &f->s;
    double sum = growth(f->v, s->n_kv_heads, s->v_dim) * (s->n_tokens + s->v_dim + 40);
    return (2 * (s->k_dim + 20) * score + sum) * pow(2, -24) * size->magnitude;
}

static bool begins(const char *spec, const char *word)
{
    return strncmp(spec, word, strlen(word)) == 0;
}

static bool has_levels(const char *spec)
{
    return begins(spec, "int") || begins(spec, "bdr") || begins(spec, "kivi") ||
           begins(spec, "innerq");
}

/* The largest integer of a query or a weight, chosen so that the sum of products over `columns`
 * numbers fits 31 bits. Levels are at most 13, which leaves 15 bits: 32639, so that it splits into
 * two bytes. A codebook has integers of 12 bits; the rest is divided by the columns. */
static double operand_limit(const char *spec, uint32_t columns)
{
    return has_levels(spec) ? 32639 : pow(2, 31 - 12) / ((columns + 15) / 16 * 16);
}

/* How far an integer of 12 bits is from the number that it stands for, divided by (the row's length
 * / sqrt(d)).
 *
 * Levels are integers, so they have no error. A codebook for numbers of variance 1 has no level
 * above 3. Rounding takes half a unit of 3 / 4095. A triplet's numbers are at most 3.75, and its
 * direction comes from an integer square root, which errs by up to 4 units. A chunk of four
 * channels may hold the length of the whole row in one number, and its table is rounded, too: 1.5
 * units of sqrt(d) / 4095. */
static double value_error(const char *spec, uint32_t dim)
{
    if (has_levels(spec))
        return 0;
    if (begins(spec, "octopus"))
        return 4 * 3.75 / 4095;
    if (begins(spec, "hqmq") || begins(spec, "spherical") || begins(spec, "addvq"))
        return 1.5 * sqrt(dim) / 4095;
    return 3.0 / (2 * 4095);
}

/* Attention on codes (src/attention/codes.h) also rounds queries, weights and codebooks to
 * integers.
 *
 * Scores: each of a query's d integers errs uniformly by up to half a step, at most |q| / limit. So
 * the error of a score has a standard deviation below |q| |k| / (limit sqrt(12)). A codebook's
 * errors add one below |q| (|k| / sqrt(d)) value_error. One score in 5e8 exceeds six standard
 * deviations of both together. A score that errs by e moves the output by e times its weight's
 * share of the spread.
 *
 * If scales belong to columns, integers stand for q x scale. They err by up to half of
 * max |q scale| / limit, times a code of at most m. With b bits, m is 2^(b-1) and a scale is at
 * most 2 max |k| / (2^b - 1). So m times the scale is below 4/3 max |k|. A channel then adds
 * 4/3 |q| |k| / limit, where it added its own part of |k| before. In all that is sqrt(d) 4/3 times
 * as much.
 *
 * Weights: each of 64 slots errs by up to half a step, which is the page's largest weight
 * x scale / limit. The error moves the output by a row of values. In these tests the longest value
 * of a page is at most 4 times as long as the shortest, and twice as long as seen from a zero
 * point. A codebook's values err by value_error (|v| / sqrt(d)) in each channel. With unbiased
 * scales, |v| exceeds the row's length by less than a factor of 1.2. */
static double integers(const fixture *f, double score, const sizes *size)
{
    const setup *s = &f->s;
    const kvant_codec *k = f->k_codecs[0], *v = f->v_codecs[0];
    if (s->exact)
        return 0;
    double error = 0, values = growth(f->v, s->n_kv_heads, s->v_dim) * size->longest;
    if (k->product.lines) {
        double channels = k->product.by_row ? 1 : sqrt(s->k_dim) * 4 / 3;
        error += 6 * score *
                 (channels / (operand_limit(s->k_spec, s->k_dim) * sqrt(12)) +
                  1.2 * value_error(s->k_spec, s->k_dim) / sqrt(s->k_dim)) *
                 size->spread;
    }
    if (v->product.lines)
        error += (64.0 / 2 / operand_limit(s->v_spec, 64) * size->peaks * 4 * 2 +
                  1.2 * value_error(s->v_spec, s->v_dim)) *
                 values;
    return error;
}

void check(const fixture *f)
{
    const setup *s = &f->s;
    uint32_t first = (s->n_sequences - 1) * f->blocks * 64;
    size_t k_width = (size_t)s->n_kv_heads * s->k_dim, v_width = (size_t)s->n_kv_heads * s->v_dim;
    float *keys = malloc(s->n_tokens * k_width * sizeof *keys),
          *values = malloc(s->n_tokens * v_width * sizeof *values);
    double *want = malloc(s->v_dim * sizeof *want), score, longest[MAX_KV_HEADS] = { 0 };
    sizes size;
    assert_int_equal(kvant_tensor_read(f->k, first, s->n_tokens, keys, k_width), KVANT_OK);
    assert_int_equal(kvant_tensor_read(f->v, first, s->n_tokens, values, v_width), KVANT_OK);
    score = largest_score(f, keys);
    for (uint32_t i = 0; i < s->n_tokens * s->n_kv_heads; i++)
        longest[i % s->n_kv_heads] =
            fmax(longest[i % s->n_kv_heads], length(values + (size_t)i * s->v_dim, s->v_dim));
    for (uint32_t t = 0; t < s->n_queries; t++)
        for (uint32_t h = 0; h < s->n_heads; h++) {
            reference(f, keys, values, longest[h / (s->n_heads / s->n_kv_heads)], t, h, want,
                      &size);
            double bound = rounding(f, score, &size) + integers(f, score, &size);
            for (uint32_t i = 0; i < s->v_dim; i++) {
                double got = f->data.out[((size_t)t * s->n_heads + h) * s->v_dim + i];
                if (!(fabs(got - want[i]) <= bound + 1e-30))
                    fail_msg("%s/%s %s token %u head %u channel %u: %.9g, not %.9g (bound %.3g)",
                             s->k_spec, s->v_spec, kvant_cpu_level_name(kvant_get_cpu_level()), t,
                             h, i, got, want[i], bound);
            }
        }
    free(keys);
    free(values);
    free(want);
}

void check_setup(setup s)
{
    fixture f = make_fixture(s);
    for (size_t i = 0; i < COUNT(cpu_levels); i++) {
        if (!use_level(cpu_levels[i]))
            continue;
        run(&f);
        check(&f);
    }
    kvant_set_cpu_level(KVANT_CPU_AUTO);
    free_fixture(&f);
}
