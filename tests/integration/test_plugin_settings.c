/* test_plugin_settings.c - wrong settings and wrong flags are refused with a line that says what to
 * do. test_plugin_foreign.c tests wrong ggml versions. Every case runs in its own process
 * (plugin_probe), because some cases end the process. */
#define _POSIX_C_SOURCE 200809L /* popen, mkstemp */

#include "outcome.h"

CASE(defaults_work)
{
    struct outcome outcome = run("KVANT_QUIET=1", KVANT_TEST_PROBE, "f16 on");

    assert_int_equal(outcome.status, 0);
    assert_string_equal(outcome.output, "");
}

/* The line's bits per number are its MiB, spread over the numbers, which take 2 bytes each in fp16.
 * So bits and MiB count the same memory. MiB have one decimal, so either may be off by 0.05. */
static bool counts_everything(const struct outcome *outcome)
{
    const char *bits_at = strstr(outcome->output, ": "),
               *mib_at = strstr(outcome->output, " layers, "),
               *f16_at = strstr(outcome->output, "(f16: ");
    double bits, mib, f16;

    bits_at = bits_at != NULL ? strstr(bits_at + 2, ": ") : NULL;
    if (bits_at == NULL || mib_at == NULL || f16_at == NULL)
        return false;
    bits = atof(bits_at + 2);
    mib = atof(mib_at + strlen(" layers, "));
    f16 = atof(f16_at + strlen("(f16: "));
    print_message("%.2f bits per number, %.1f of %.1f MiB\n", bits, mib, f16);
    return bits > 16 * (mib - 0.05) / (f16 + 0.05) - 0.005 &&
           bits < 16 * (mib + 0.05) / (f16 - 0.05) + 0.005;
}

/* One line names a preset. The cache has 256 cells, and 30 layers of 3 kv heads with 64 numbers. It
 * takes 5.6 MiB in fp16. */
CASE(a_context_begins_with_a_line)
{
    static const struct {
        const char *environment, *line;
    } cases[] = {
        { "", "KV cache balanced: " },
        { "KVANT_PRESET=small", "KV cache small: " },
        { "KVANT_K=int-8", "KV cache int-8: 8.50 bits per number, 30 of 30 layers, 3.0 MiB for 256 "
                           "tokens (f16: 5.6 MiB)" },
        { "KVANT_K=int-8 KVANT_V=f16", "KV cache int-8 / f16: 12.25 bits per number, " },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct outcome outcome = run(cases[i].environment, KVANT_TEST_PROBE, "f16 on");
        const char *calibrate = strstr(outcome.output, "; not calibrated, learns from prompts\n");
        assert_int_equal(outcome.status, 0);
        assert_true(says(&outcome, cases[i].line));
        assert_true(says(&outcome, " bits per number, 30 of 30 layers, "));
        assert_true(says(&outcome, "; f16 itself for all 256 tokens"));
        assert_true(says(&outcome, " MiB while it learns; ") == (i < 2));
        assert_true(counts_everything(&outcome));
        assert_ptr_equal(strchr(outcome.output, '\n'), outcome.output + strlen(outcome.output) - 1);
        assert_true((calibrate != NULL) == (i < 2)); /* of presets */
    }
}

/* What KVANT_EXACT=auto, the default, does with a cache that is never f16 in place. */
CASE(the_line_says_that_nothing_is_in_place)
{
    static const char exact[] =
        "; compressed from the first token, with the first 64 and newest 64 tokens exact";
    struct outcome outcome = run("KVANT_EXACT=0", KVANT_TEST_PROBE, "f16 on");

    assert_int_equal(outcome.status, 0);
    assert_true(says(&outcome, exact));
    assert_false(says(&outcome, "f16 at first"));
    outcome = run("PROBE_STREAMS=2", KVANT_TEST_PROBE, "f16 on");
    assert_int_equal(outcome.status, 0);
    assert_true(says(&outcome, exact));
    assert_true(says(&outcome, "; f16 at first with -np 1 or --kv-unified; not calibrated, "));
    outcome = run("PROBE_STREAMS=2 KVANT_K=int-8", KVANT_TEST_PROBE, "f16 on");
    assert_true(says(&outcome, "; compressed from the first token; f16 at first with -np 1 "));
    outcome = run("PROBE_STREAMS=2 KVANT_EXACT=auto", KVANT_TEST_PROBE, "f16 on");
    assert_true(says(&outcome, "; KVANT_EXACT does nothing with several streams: "));
}

CASE(verbose_names_codecs)
{
    struct outcome outcome =
        run("KVANT_VERBOSE=1 KVANT_K=int-8 KVANT_V=f16", KVANT_TEST_PROBE, "f16 on");

    assert_int_equal(outcome.status, 0);
    assert_true(says(&outcome, "cache_k_l0: int-8"));
    assert_true(says(&outcome, "8.500 codec bits"));
    assert_true(says(&outcome, "cache_v_l29: f16"));
    outcome = run("KVANT_VERBOSE=1 KVANT_V=int-8", KVANT_TEST_PROBE, "f16 on");
    assert_true(says(&outcome, "cache_k_l0: int-8"));
    assert_true(says(&outcome, "cache_v_l29: int-8"));
}

/* The default is a preset. A calibration makes better codecs of presets. A calibration of another
 * model shows in the message of a codec. */
CASE(presets_name_codecs)
{
    static const struct {
        const char *environment, *k, *v;
    } cases[] = { { "", "trellis-4:", "trellis-4:" },
                  { "KVANT_PRESET=balanced", "trellis-4:", "trellis-4:" },
                  { "KVANT_PRESET=quality", "turboquant-6:", "trellis-4:" },
                  { "KVANT_PRESET=small", "trellis-3:", "trellis-3:" } };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char environment[256], line[128];
        struct outcome outcome;

        snprintf(environment, sizeof(environment), "KVANT_VERBOSE=1 %s", cases[i].environment);
        outcome = run(environment, KVANT_TEST_PROBE, "f16 on");
        assert_int_equal(outcome.status, 0);
        snprintf(line, sizeof(line), "cache_k_l0: %s", cases[i].k);
        assert_true(says(&outcome, line));
        assert_true(says(&outcome, "center=first,norm=first"));
        snprintf(line, sizeof(line), "cache_v_l29: %s", cases[i].v);
        assert_true(says(&outcome, line));
    }
}

/* A settings file of text lines and their checksum. */
static void write_config(const char *path, const char *body)
{
    uint64_t checksum = 0xcbf29ce484222325u;
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    for (const char *at = body; *at != '\0'; at++)
        checksum = (checksum ^ (unsigned char)*at) * 0x100000001b3u;
    fprintf(file, "%scheck %016llx\n", body, (unsigned long long)checksum);
    assert_int_equal(fclose(file), 0);
}

static struct outcome run_config(const char *body, const char *more)
{
    char path[] = "/tmp/kvant-config-XXXXXX", environment[256];
    struct outcome outcome;

    assert_int_not_equal(mkstemp(path), -1);
    write_config(path, body);
    snprintf(environment, sizeof(environment), "KVANT_VERBOSE=1 KVANT_CONFIG=%s %s", path, more);
    outcome = run(environment, KVANT_TEST_PROBE, "f16 on");
    remove(path);
    return outcome;
}

CASE(settings_file_names_codecs)
{
    struct outcome outcome =
        run_config("kvant-settings 1\nlayers 30\nk 0,29 3x64 f16\nk 1-28 3x64 int-8\n"
                   "v 0-14 3x64 int-4:group=32\nv 15-29 3x64 int-5\n",
                   "");
    char line[64];

    assert_int_equal(outcome.status, 0);
    for (int layer = 0; layer < 30; layer++) {
        snprintf(line, sizeof(line), "cache_k_l%d: %s", layer,
                 layer == 0 || layer == 29 ? "f16," : "int-8:");
        assert_true(says(&outcome, line));
        snprintf(line, sizeof(line), "cache_v_l%d: %s", layer,
                 layer < 15 ? "int-4:group=32," : "int-5:");
        assert_true(says(&outcome, line));
    }
}

/* The reported bits are the mean of 16, 4.25 and 16. */
CASE(settings_file_names_codecs_of_kv_heads)
{
    struct outcome outcome =
        run_config("kvant-settings 1\nlayers 30\nk 0-29 3x64 f16\nv 0-28,29/0,29/2 3x64 f16\n"
                   "v 29/1 3x64 turboquant-4\n",
                   "");

    assert_int_equal(outcome.status, 0);
    assert_true(says(&outcome, "cache_v_l28: f16, head_dim 64"));
    assert_true(says(&outcome, "cache_v_l29: f16 and others, head_dim 64, 3 kv heads"));
    assert_true(says(&outcome, "12.083 codec bits"));
}

/* SmolLM2 has 30 layers of 3 kv heads of 64. */
CASE(settings_file_of_another_model_is_refused)
{
    static const struct {
        const char *body, *said;
    } cases[] = {
        { "kvant-settings 1\nmodel M\nlayers 18\nk 0-17 3x64 f16\nv 0-17 3x64 f16\n",
          "for a model of 18 layers (M), but this model has at least 30" },
        { "kvant-settings 1\nmodel M\nlayers 31\nk 0-30 3x64 f16\nv 0-30 3x64 f16\n",
          "for a model of 31 layers (M), but this model has 30" },
        { "kvant-settings 1\nmodel M\nlayers 30\nk 0-29 3x64 f16\nv 0-29 2x64 f16\n",
          "for a model with 2 kv heads of head_dim 64 (M)" },
        { "kvant-settings 1\nmodel M\nlayers 30\nk 0-29 6x32 f16\nv 0-29 3x64 f16\n",
          "KVANT_CONFIG says 32; use" },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct outcome outcome = run_config(cases[i].body, "");
        assert_int_not_equal(outcome.status, 0);
        assert_int_not_equal(outcome.status, 128 + 11);
        assert_true(says(&outcome, cases[i].said));
    }
}

CASE(settings_file_chooses_alone)
{
    static const char body[] = "kvant-settings 1\nlayers 30\nk 0-29 3x64 f16\nv 0-29 3x64 f16\n";
    static const char needs[] =
        "kvant-settings 1\nlayers 30\ncalibration 0123456789abcdef absent.kvcal\n"
        "k 0-29 3x64 f16\nv 0-29 3x64 f16\n";
    static const char mixed[] =
        "kvant-settings 1\nlayers 30\nk 0/0 3x64 int-4:sink=4\nk 0/1,0/2,1-29 3x64 f16\n"
        "v 0-29 3x64 f16\n";
    static const struct {
        const char *body, *more, *said;
    } cases[] = { { body, "KVANT_K=f16", "KVANT_CONFIG and KVANT_K are both set" },
                  { body, "KVANT_PRESET=small", "KVANT_CONFIG and KVANT_PRESET are both set" },
                  { body, "KVANT_PROTECT=1", "KVANT_CONFIG and KVANT_PROTECT are both set" },
                  { needs, "", "absent.kvcal: No such file" },
                  { mixed, "", "layer 0, keys, f16: its sink, recent or kind of centre" } };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct outcome outcome = run_config(cases[i].body, cases[i].more);
        assert_int_equal(outcome.status, 3); /* the plug-in declined to load */
        assert_true(says(&outcome, cases[i].said));
    }
}

/* SmolLM2 has 30 layers. Which layer is the last is known only when all layers exist. */
CASE(first_and_last_layers_are_protected)
{
    static const struct {
        const char *environment, *protected_spec;
    } cases[] = { { "KVANT_PROTECT=2", "f16" },
                  { "KVANT_PROTECT=2 KVANT_PROTECT_CODEC=int-8 KVANT_HEAD_DIM=64", "int-8:" },
                  { "KVANT_PROTECT=2 KVANT_PROTECT_CODEC=int-4 KVANT_K=f16 KVANT_V=f32",
                    "int-4:" } };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char environment[256], line[64];
        struct outcome outcome;

        snprintf(environment, sizeof(environment), "KVANT_VERBOSE=1 KVANT_K=bf16 KVANT_V=bf16 %s",
                 cases[i].environment);
        outcome = run(environment, KVANT_TEST_PROBE, "f16 on");
        assert_int_equal(outcome.status, 0);
        for (int layer = 0; layer < 30; layer++)
            for (int role = 0; role < 2; role++) {
                bool is_protected = layer < 2 || layer >= 28;
                const char *usual = i < 2 ? "bf16" : role ? "f32" : "f16";
                snprintf(line, sizeof(line), "cache_%c_l%d: %s", role ? 'v' : 'k', layer,
                         is_protected ? cases[i].protected_spec : usual);
                assert_true(says(&outcome, line));
            }
    }
}

/* Layers 1 and 3 of 4 have a cache. */
CASE(protected_layers_are_those_with_a_cache)
{
    struct outcome outcome = run("KVANT_VERBOSE=1 KVANT_K=bf16 KVANT_PROTECT=1 "
                                 "PROBE_MODEL=" KVANT_TEST_TINY "/lfm2.gguf",
                                 KVANT_TEST_PROBE, "f16 on");

    assert_int_equal(outcome.status, 0);
    assert_true(says(&outcome, "cache_k_l1: f16"));
    assert_true(says(&outcome, "cache_v_l3: f16"));
}

CASE(head_dim_can_be_given)
{
    struct outcome outcome = run("KVANT_HEAD_DIM=64", KVANT_TEST_PROBE, "f16 on");

    assert_int_equal(outcome.status, 0);
}

/* Rows have 192 numbers. The head_dim 96 divides 192, so only a graph shows that it is wrong. */
CASE(wrong_head_dim_is_refused)
{
    static const struct {
        const char *environment, *said;
    } cases[] = { { "KVANT_HEAD_DIM=96", "KVANT_HEAD_DIM is 96" },
                  { "KVANT_HEAD_DIM=96 KVANT_K=f16", "KVANT_HEAD_DIM is 96" },
                  { "KVANT_HEAD_DIM=128",
                    "KVANT_HEAD_DIM=128 does not divide rows of 192 values" } };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct outcome outcome = run(cases[i].environment, KVANT_TEST_PROBE, "f16 on");
        assert_int_equal(outcome.status, 4); /* no context */
        assert_true(says(&outcome, cases[i].said));
        assert_int_equal(lines_of(&outcome), 1);
    }
}

/* GPU kernels do not support dense rotation, which is the default if head_dim is no power of
 * two. */
CASE(other_rotations_of_a_gpu_are_told)
{
    static const char told[] = "the GPU rotates by Hadamard matrices instead of rotate=dense";
    static const char gpu[] = KVANT_TEST_GPU " PROBE_MODEL=" KVANT_TEST_TINY;
    char environment[1024];
    struct outcome outcome;

    snprintf(environment, sizeof(environment), "%s/llama80.gguf", gpu);
    outcome = run(environment, KVANT_TEST_PROBE, "f16 on");
    assert_int_equal(outcome.status, 0);
    assert_true(says(&outcome, told));
    assert_int_equal(lines_of(&outcome), 2); /* the line of the cache, and one for all layers */
    snprintf(environment, sizeof(environment), "%s/llama.gguf", gpu);
    outcome = run(environment, KVANT_TEST_PROBE, "f16 on");
    assert_int_equal(outcome.status, 0);
    assert_int_equal(lines_of(&outcome), 1);
    outcome = run("PROBE_MODEL=" KVANT_TEST_TINY "/llama80.gguf", KVANT_TEST_PROBE, "f16 on");
    assert_int_equal(outcome.status, 0);
    assert_int_equal(lines_of(&outcome), 1);
}

/* llama.cpp keeps the rest of a cache itself, and a line reports it. */
CASE(layers_without_a_plain_cache_are_told)
{
    static const struct {
        const char *model, *told;
        int n_lines;
    } cases[] = {
        { "deepseek2", "keys without values (MLA, an indexer): that cache is not compressed", 1 },
        { "lfm2", "2 of 4 layers have a KV cache and are compressed; 2 keep recurrent", 2 },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char environment[1024];
        struct outcome outcome;

        snprintf(environment, sizeof(environment), "PROBE_MODEL=" KVANT_TEST_TINY "/%s.gguf",
                 cases[i].model);
        outcome = run(environment, KVANT_TEST_PROBE, "f16 on");
        assert_int_equal(outcome.status, 0);
        assert_true(says(&outcome, cases[i].told));
        assert_int_equal(lines_of(&outcome), cases[i].n_lines);
    }
}

CASE(bad_values_name_variable_and_valid_values)
{
    static const struct {
        const char *environment, *named, *valid;
    } cases[] = {
        { "KVANT_K=turbo-4", "KVANT_K=turbo-4", "turboquant" },
        { "KVANT_V=turboquant-99", "KVANT_V=turboquant-99", "8" },
        { "KVANT_K=turboquant-4:scale=huge", "KVANT_K=turboquant-4:scale=huge", "unbiased" },
        { "KVANT_SEED=-1", "KVANT_SEED=-1", "from 0 to 18446744073709551615" },
        { "KVANT_SEED=12x", "KVANT_SEED=12x", "from 0 to" },
        { "KVANT_FP32=2", "KVANT_FP32=2", "from 0 to 1" },
        { "KVANT_HOST_THREADS=2", "KVANT_HOST_THREADS=2", "from 0 to 1" },
        { "KVANT_GPU=2", "KVANT_GPU=2", "from 0 to 1" },
        { "KVANT_HEAD_DIM=0", "KVANT_HEAD_DIM=0", "from 1 to 512" },
        { "KVANT_HEAD_DIM=513", "KVANT_HEAD_DIM=513", "from 1 to 512" },
        { "KVANT_K=int-4:recent=x", "recent", "from 0 to" },
        { "KVANT_PROTECT=-1", "KVANT_PROTECT=-1", "from 0 to 1000" },
        { "KVANT_PROTECT_CODEC=f8", "KVANT_PROTECT_CODEC=f8", "there are f32, f16" },
        { "KVANT_PRESET=large", "KVANT_PRESET=large", "quality, balanced, small or tiny" },
        { "KVANT_PRESET=small KVANT_V=f16", "KVANT_PRESET and KVANT_V are both set", "unset one" },
        { "KVANT_CONFIG=/nowhere/at.all", "KVANT_CONFIG=/nowhere/at.all", "No such file" },
        { "KVANT_CONFIG=/dev/null", "KVANT_CONFIG=/dev/null", "not a regular file" },
        { "KVANT_CALIBRATION=/nowhere/at.all", "KVANT_CALIBRATION=/nowhere/at.all",
          "No such file" },
        { "KVANT_CPU=sse", "KVANT_CPU=sse", "avx512vnni" },
        { "KVANT_VERBOSE=yes", "KVANT_VERBOSE=yes", "from 0 to 1" },
        { "KVANT_QUIET=yes", "KVANT_QUIET=yes", "from 0 to 1" },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct outcome outcome = run(cases[i].environment, KVANT_TEST_PROBE, "f16 on");
        assert_int_equal(outcome.status, 3); /* ggml_backend_init returned NULL */
        assert_true(says(&outcome, cases[i].named));
        assert_true(says(&outcome, cases[i].valid));
    }
}

/* Keys move with their transform on a GPU, and codes of groups of tokens would have to be encoded
 * again. Without a transform these codecs are served. */
CASE(transforms_of_groups_of_tokens_are_refused)
{
    static const char gpu[] = KVANT_TEST_GPU " PROBE_MODEL=" KVANT_TEST_TINY "/llama.gguf";
    static const char *const specs[] = { "int-4:axis=channel,transform=first",
                                         "int-4:axis=channel" };
    char environment[1024];

    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++) {
        snprintf(environment, sizeof(environment), "%s KVANT_K=%s KVANT_V=int-4:axis=channel", gpu,
                 specs[i]);
        struct outcome outcome = run(environment, KVANT_TEST_PROBE, "f16 on");
        assert_int_equal(outcome.status, i == 0 ? 4 : 0);
        assert_int_equal(lines_of(&outcome), 1);
        assert_true(says(&outcome, i == 0 ? "leave out transform" : "KV cache"));
    }
}

/* No context, and no abort: on the CPU and on a GPU. */
CASE(flash_attention_off_says_which_flag)
{
    static const char *const environments[] = { "", KVANT_TEST_GPU };

    for (size_t i = 0; i < sizeof(environments) / sizeof(environments[0]); i++) {
        struct outcome outcome = run(environments[i], KVANT_TEST_PROBE, "f16 off");
        assert_int_equal(outcome.status, 4);
        assert_true(says(&outcome, "-fa on"));
        assert_int_equal(lines_of(&outcome), 1);
    }
}

/* A nominal type other than f16: no context, no abort. */
CASE(other_cache_types_say_which_flag)
{
    static const char *const types[] = { "q8_0 on", "f32 on", "q8_0/f16 on", "f16/q8_0 on" };

    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        struct outcome outcome = run("", KVANT_TEST_PROBE, types[i]);
        assert_int_equal(outcome.status, 4);
        assert_true(says(&outcome, "-ctk f16 -ctv f16"));
        assert_true(says(&outcome, "--accel"));
    }
}

/* llama.cpp counts the output as a layer of -ngl. */
CASE(layers_without_us_are_counted)
{
    struct outcome outcome = run("", KVANT_TEST_PROBE, "f16 on 5");

    assert_int_equal(outcome.status, 0);
    assert_true(says(&outcome, "only 4 of 30 layers have a compressed cache"));
    assert_true(says(&outcome, "the other 26 keep llama.cpp's own: set -ngl 99"));
    outcome = run("", KVANT_TEST_PROBE, "f16 on -1"); /* the last layer is on another device */
    assert_int_equal(outcome.status, 0);
    assert_true(says(&outcome, "29 of 30 layers, "));
    assert_true(says(&outcome, "only 29 of 30 layers have a compressed cache"));
    outcome = run("KVANT_QUIET=1", KVANT_TEST_PROBE, "f16 on 0");
    assert_int_equal(outcome.status, 0);
    assert_true(says(&outcome, "warning: no layer has a compressed cache"));
    assert_true(says(&outcome, "-ngl 0"));
}

RUN_CASES(NULL, NULL)
