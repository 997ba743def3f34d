#define _POSIX_C_SOURCE 200809L /* setenv, mkstemp */
/* test_plugin_fill.c - the bytes that the plug-in reports for a cache with a part of its tokens
 * (kvant_kv_size_at: `kvant inspect`), compared with the counted bytes at that point of a text.
 * Also the token up to which the plug-in says that a GPU's cache is f16 in place. */

#include "harness.h"
#include "kv_fill.h"

#define N_FILLS 4
static const double shares[N_FILLS] = { 1.0 / 16, 0.25, 0.5, 1 };

static void *plugin_function(const char *name)
{
    void *symbol = ggml_backend_reg_get_proc_address(harness_plugin(), name);

    assert_non_null(symbol);
    return symbol;
}

static double counted_bytes(void)
{
    void *symbol = plugin_function("kvant_kv_memory");
    size_t (*memory)(size_t *), reserved;

    memcpy(&memory, &symbol, sizeof(memory));
    return (double)memory(&reserved);
}

static bool ask(bool on_gpu, double tokens, kvp_kv_size *size, double *in_place)
{
    void *symbol = plugin_function("kvant_kv_size_at");
    kvp_kv_size_at_fn *function;

    memcpy(&function, &symbol, sizeof(function));
    *size = (kvp_kv_size){ .size = sizeof(*size) };
    return function(on_gpu, tokens, size, in_place);
}

static kvp_kv_size said_at(double tokens)
{
    kvp_kv_size size;
    double in_place;

    assert_true(ask(harness_on_gpu(), tokens, &size, &in_place));
    assert_true(in_place == 0); /* KVANT_EXACT is 0 */
    return size;
}

static kvp_kv_size said_in_all(void)
{
    void *symbol = plugin_function("kvant_kv_size");
    kvp_kv_size_fn *function;
    kvp_kv_size size = { .size = sizeof(size) };

    memcpy(&function, &symbol, sizeof(function));
    assert_true(function(harness_on_gpu(), &size));
    return size;
}

/* Decodes a prompt in batches, and some tokens one by one at the end. */
static void feed(struct llama_context *context, const llama_token *tokens, int first, int end)
{
    const int alone = end - 8;

    for (int at = first, n; at < end; at += n) {
        n = at >= alone ? 1 : alone - at < 512 ? alone - at : 512;
        harness_decode(context, tokens + at, n, at, 0, false);
    }
    llama_synchronize(context);
}

static double n_tensors(void)
{
    return 2.0 * llama_model_n_layer(harness_model());
}

/* The plug-in counts some memory that its reported size leaves out. In the computer's memory, a
 * tensor shares the system's pages at its two ends. A GPU (test_plugin_size.c) aligns tensors to
 * 256 bytes, has tables of 16 bytes for each token, and 16 KiB for attention's workspace. Copies of
 * a batch go to the threads that learn. */
static double uncounted(uint32_t n_ctx)
{
    const struct llama_model *model = harness_model();
    const double head_dim = (double)llama_model_n_embd(model) / llama_model_n_head(model);
    const double heads = llama_model_n_head(model) + llama_model_n_head_kv(model);
    const double copies = 8 * 512.0 * heads * (head_dim > 128 ? head_dim : 128) * sizeof(float);

    if (!harness_on_gpu())
        return n_tensors() * 2 * 4096;
    return n_tensors() * 256 + 16.0 * n_ctx + 16384 + copies;
}

/* Memory in the reported size that a cache may not use. Exact blocks have no codes yet; there are
 * at most as many as fp16 pages. One fp16 page of each tensor is for rows that begin within a
 * block, and these batches may never need it. A GPU reserves both. A preset always makes its first
 * transform, on a GPU when rows leave the fp16 pages, and makes further ones where they lower the
 * error. */
static double unused(const kvp_kv_size *s, double transform)
{
    const double numbers = s->numbers[0] + s->numbers[1];
    const double open = s->exact / (sizeof(uint16_t) * numbers); /* exact tokens */
    const double codes = s->codec_bits / 8 * (open < 1 ? open : 1);
    const double page = s->exact > 0 ? 64 * sizeof(uint16_t) * numbers / s->cells : 0;

    if (harness_on_gpu())
        return s->transforms - (open < 1 ? transform : 0);
    return s->transforms - transform + codes + page;
}

static void assert_counted(const kvp_kv_size *s, double counted, double transform, uint32_t n_ctx)
{
    print_message("%.0f of %u tokens: said %.0f (%.0f exact, %.0f transforms), and %.0f while it "
                  "learns; counted %.0f\n",
                  s->cells, n_ctx, s->bytes, s->exact, s->transforms, s->working, counted);
    assert_true(counted >= s->bytes - unused(s, transform));
    assert_true(counted <= s->bytes + s->working + uncounted(n_ctx));
}

static bool is_same(const kvp_kv_size *a, const kvp_kv_size *b)
{
    return a->bytes == b->bytes && a->exact == b->exact && a->transforms == b->transforms &&
           a->working == b->working && a->cells == b->cells && a->codec_bits == b->codec_bits;
}

/* n_first: the number of transforms that the size for 64 tokens counts. */
static void check(const char *spec, uint32_t n_ctx, int n_first)
{
    const harness_options options = { .spec = spec, .n_ctx = n_ctx, .unified = true };
    struct llama_context *context = harness_context(&options);
    llama_token *tokens = malloc(n_ctx * sizeof(*tokens));
    const kvp_kv_size all = said_in_all(), first = said_at(64), beyond = said_at(2.0 * n_ctx);
    kvp_kv_size said[N_FILLS], again;
    double in_place;

    assert_non_null(tokens);
    harness_tokens(tokens, (int)n_ctx);
    for (int i = 0; i < N_FILLS; i++)
        said[i] = said_at(shares[i] * n_ctx);
    assert_true(is_same(&said[N_FILLS - 1], &all) && is_same(&beyond, &all));
    for (int i = 0, done = 0; i < N_FILLS; i++) {
        const int n = (int)(shares[i] * n_ctx);
        feed(context, tokens, done, n);
        done = n;
        assert_true(said[i].cells == n);
        assert_counted(&said[i], counted_bytes(), first.transforms / n_first, n_ctx);
    }
    /* If a tensor has learned, this question must not make it forget its RoPE. */
    assert_true(harness_on_gpu() || first.transforms == 0 ||
                !ask(false, n_ctx / 2.0, &again, &in_place));
    free(tokens);
    llama_free(context);
}

static char config[] = "/tmp/kvant-config-XXXXXX";

static int forget_config(void **state)
{
    unsetenv("KVANT_CONFIG");
    remove(config);
    return 0;
}

/* Writes a settings file for this model, with codecs that learn nothing. */
static void write_config(void)
{
    const struct llama_model *model = harness_model();
    const int last = llama_model_n_layer(model) - 1, n_heads = llama_model_n_head_kv(model);
    const int head_dim = llama_model_n_embd(model) / llama_model_n_head(model);
    uint64_t checksum = 0xcbf29ce484222325u;
    char body[256];
    FILE *file = fdopen(mkstemp(config), "wb");

    assert_non_null(file);
    snprintf(body, sizeof(body),
             "kvant-settings 1\nlayers %d\nk 0-%d %dx%d trellis-4\nv 0-%d %dx%d trellis-4\n",
             last + 1, last, n_heads, head_dim, last, n_heads, head_dim);
    for (const char *at = body; *at != '\0'; at++)
        checksum = (checksum ^ (unsigned char)*at) * 0x100000001b3u;
    fprintf(file, "%scheck %016llx\n", body, (unsigned long long)checksum);
    assert_int_equal(fclose(file), 0);
}

/* The codecs of a preset use much memory while they learn, which hides a size that is too small.
 * These codecs learn nothing. On a CPU all tensors share the room for the rows of a step, which
 * counts in full from the first token on. With 256 cells it is as large as all rows of one
 * tensor. */
CASE_BETWEEN(the_room_of_a_step_does_not_grow, NULL, forget_config)
{
    if (harness_on_gpu())
        return;
    write_config();
    setenv("KVANT_CONFIG", config, 1);
    check("", 256, 1);
    check("", 1024, 1);
    check("", 2304, 1);
}

/* A CPU's cache has two early transforms in addition to one for each doubling of the position. */
CASE(fills)
{
    const int n_first = harness_on_gpu() ? 1 : 3;

    check("turboquant-4", 1024, 1);
    check("turboquant-4:sink=64,recent=256", 1024, 1);
    check("", 1024, n_first);
    if (!harness_on_gpu()) /* test_plugin_size.c fills a GPU's cache beyond its first matrix */
        check("", 2304, n_first);
}

/* A cache has matrices for the first 1024 positions, and more for the next two doublings. */
CASE(transforms_come_with_positions)
{
    const harness_options options = { .spec = "", .n_ctx = 4096, .unified = true };
    struct llama_context *context = harness_context(&options);
    double last = 0;

    for (int i = 0; i < N_FILLS; i++) {
        const double n = shares[i] * 4096, now = said_at(n).transforms;
        assert_true(now >= last && (harness_on_gpu() || n <= 1024 || now > last));
        last = now;
    }
    assert_true(last > said_at(1024).transforms);
    assert_true(said_at(1025).transforms > said_at(1024).transforms || harness_on_gpu());
    llama_free(context);
}

/* Number of tokens in a context that may be f16 in place. */
static uint32_t n_cells = 1024;

static struct llama_context *new_context(const char *spec)
{
    const harness_options options = {
        .spec = spec, .n_ctx = n_cells, .unified = true, .window = true
    };

    return harness_context(&options);
}

/* exact: KVANT_EXACT, or NULL if the user did not set it. */
static double room(bool on_gpu, const char *spec, const char *exact)
{
    struct llama_context *context;
    kvp_kv_size size;
    double in_place;

    if (exact != NULL)
        setenv("KVANT_EXACT", exact, 1);
    else
        unsetenv("KVANT_EXACT");
    context = new_context(spec);
    assert_true(ask(on_gpu, 512, &size, &in_place));
    llama_free(context);
    setenv("KVANT_EXACT", "0", 1);
    return in_place;
}

static float *logits_after(const char *spec, int n)
{
    const size_t bytes = harness_n_vocab() * sizeof(float);
    struct llama_context *context = new_context(spec);
    llama_token *tokens = malloc((size_t)n * sizeof(*tokens));
    float *logits = malloc(bytes);

    assert_true(tokens != NULL && logits != NULL);
    harness_tokens(tokens, n);
    feed(context, tokens, 0, n);
    memcpy(logits, llama_get_logits_ith(context, -1), bytes);
    free(tokens);
    llama_free(context);
    return logits;
}

static bool answers_as_f16(int n)
{
    float *stock = logits_after(NULL, n), *ours = logits_after("", n);
    const bool same = memcmp(stock, ours, harness_n_vocab() * sizeof(float)) == 0;

    free(stock);
    free(ours);
    return same;
}

/* Whether the line at a context's start reports the number of kvant_kv_size_at. */
static bool is_told(bool on_gpu, const char *exact, double n)
{
    const harness_lines lines = harness_begin_lines();
    char line[1024], said[64];
    bool found = false;

    snprintf(said, sizeof(said), "; f16 itself for the first %.0f of 1024 tokens,", n);
    assert_true(room(on_gpu, "", exact) == n);
    harness_end_lines(&lines);
    while (fgets(line, sizeof(line), lines.file) != NULL)
        found = found || strstr(line, said) != NULL;
    fclose(lines.file);
    return found;
}

/* Every machine can report a GPU's number. A layer is compressed before each of the last tokens
 * that fit, and a multiple of 256 tokens fits. The mock of a GPU computes as the CPU does. So
 * the answers after these tokens are equal to f16's bit by bit, and after one more token they
 * differ. */
CASE(f16_in_place)
{
    const int n_layers = llama_model_n_layer(harness_model());
    const double n = room(true, "", "auto");

    assert_true(n >= 256 - n_layers && n <= 768 && ((int)n + n_layers) % 256 == 0);
    assert_true(room(true, "", "300") == 256 - n_layers && room(true, "", "0") == 0);
    assert_true(room(true, "", NULL) == room(true, "", "auto"));
    if (harness_on_gpu()) {
        assert_true(is_told(true, "auto", n) && is_told(true, "300", 256 - n_layers));
        assert_true(is_told(true, "4294967295", n));
    } else {
        const double here = room(false, "", "auto");
        assert_true(here > 0 && here <= 512 - n_layers && is_told(false, "auto", here));
        assert_true(is_told(false, "300", 256 - n_layers) && room(false, "", "0") == 0);
    }
    if (!harness_has_mock())
        return;
    setenv("KVANT_EXACT", "auto", 1);
    assert_true(answers_as_f16((int)n));
    assert_false(answers_as_f16((int)n + 1));
    setenv("KVANT_EXACT", "0", 1);
}

/* A cache that fits as a whole is never compressed. */
CASE(f16_for_all_tokens)
{
    assert_true(room(true, "f16", "auto") == 1024);
    assert_true(room(true, "f16", "1024") == 1024);
    assert_true(room(true, "f16", "1000") == 768 - llama_model_n_layer(harness_model()));
}

/* The pages of 512 tokens take as much memory, with their matrices, as f16. So the cache has room
 * for all of these tokens in f16, and the size says so. */
CASE(a_short_cache_stays_f16)
{
    struct llama_context *context;
    kvp_kv_size pages, f16;
    double in_place, bytes;

    n_cells = 512;
    assert_true(room(true, "", "auto") == 512 && room(true, "", "500") < 256);
    context = new_context("");
    assert_true(ask(true, 512, &pages, &in_place));
    llama_free(context);
    setenv("KVANT_EXACT", "auto", 1);
    context = new_context("");
    assert_true(ask(true, 512, &f16, &in_place));
    llama_free(context);
    bytes = 2 * (f16.numbers[0] + f16.numbers[1]);
    assert_true(pages.bytes >= bytes && f16.bytes - f16.transforms >= bytes);
    if (harness_has_mock())
        assert_true(answers_as_f16(500));
    setenv("KVANT_EXACT", "0", 1);
    n_cells = 1024;
}

/* The pages of 2048 tokens take as much memory as 992 rows of f16, which is almost 1024. */
CASE(f16_for_two_batches)
{
    n_cells = 2048;
    assert_true(room(true, "", "auto") == 1024 - llama_model_n_layer(harness_model()));
    n_cells = 1024;
}

/* The cache of a sliding window has 768 cells here: for the window and a batch, in steps of 256.
 * With pages for 512 rows of a batch it has room for all of them as f16, so the cache of all tokens
 * leaves f16 first. The reported number subtracts the layers of both caches. The cache of all
 * tokens has two of the four layers, so f16 holds for two tokens more. */
CASE(f16_in_a_windows_cache)
{
    int n;

    harness_load_tiny("gemma3");
    n_cells = 4096;
    n = (int)room(true, "", "auto");
    assert_true(n > 768 && n < 4096 && (n + llama_model_n_layer(harness_model())) % 256 == 0);
    if (!harness_has_mock())
        return;
    setenv("KVANT_EXACT", "auto", 1);
    assert_true(answers_as_f16(n + 2));
    assert_false(answers_as_f16(n + 3));
    setenv("KVANT_EXACT", "0", 1);
}

RUN_CASES(harness_start, harness_stop)
