/* test_plugin_foreign.c - ggml libraries that the plug-in was not built for are refused with a line
 * that says what to do; libraries with the same tables run. Every case runs in its own process
 * (foreign_loader), because some cases end the process. */
#define _POSIX_C_SOURCE 200809L /* popen */

#include "outcome.h"

CASE(foreign_ggml_is_refused)
{
    static const struct {
        const char *setting, *arguments, *found;
    } cases[] = {
        { "", "0.25.0 none", "exports no ggml" },
        { "", "0.25.0 bare", "does not export" },
        { "KVANT_STRICT_GGML=1", "0.24.9 whole",
          "found ggml 0.24.9, but KVANT_STRICT_GGML=1 accepts" },
        { "KVANT_STRICT_GGML=1", "0.250.0 whole", "found ggml 0.250.0" },
        { "KVANT_STRICT_GGML=yes", "0.25.1 whole", "KVANT_STRICT_GGML=yes" },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct outcome outcome =
            run(cases[i].setting, KVANT_TEST_FOREIGN_LOADER, cases[i].arguments);
        assert_int_equal(outcome.status, 0); /* the loader's own check, which got NULL */
        assert_true(says(&outcome, cases[i].found));
        assert_int_equal(lines_of(&outcome), 1);
    }
}

/* A version that was tried runs without a line, a newer version with one. */
CASE(ggml_with_the_same_tables_runs)
{
    static const struct {
        const char *setting, *version;
        int lines;
    } cases[] = { { "", "0.10.0 whole", 0 },
                  { "", "0.27.5 whole", 0 },
                  { "KVANT_STRICT_GGML=1", "0.26.3 whole", 0 },
                  { "KVANT_STRICT_GGML=0", "0.28.0 whole", 1 },
                  { "KVANT_QUIET=1", "0.28.0 whole", 0 },
                  { "", "1.10.0 whole", 1 },
                  { "", "next whole", 1 } };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct outcome outcome = run(cases[i].setting, KVANT_TEST_FOREIGN_LOADER, cases[i].version);
        assert_int_equal(outcome.status, 1);
        assert_int_equal(lines_of(&outcome), cases[i].lines);
        assert_true(cases[i].lines == 0 ||
                    says(&outcome, "is newer than the versions that kvant was tried with"));
    }
}

/* An older ggml reserves no scratch memory after attention's output, which a GPU's attention
 * needs. */
CASE(an_old_ggml_leaves_gpus_alone)
{
    static const char alone[] =
        "works in the computer's memory, because it was not tried on a GPU with "
        "ggml 0.20.0, which is older than 0.21; KVANT_GPU=1 tries it";
    static const char gpu[] =
        "KVANT_VERBOSE=1 FOREIGN_BACKEND=" KVANT_TEST_CUDA " " KVANT_TEST_DRIVER;
    static const struct {
        const char *setting, *loader;
        bool told, used;
    } cases[] = { { "", "0.20.0 old", true, false },
                  { "KVANT_GPU=0", "0.20.0 old", false, false },
                  { "KVANT_GPU=1", "0.20.0 old", false, true },
                  { "", "0.21.0 whole", false, true } };
    struct outcome outcome;
    char environment[1024];

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        snprintf(environment, sizeof(environment), "%s %s", gpu, cases[i].setting);
        outcome = run(environment, KVANT_TEST_FOREIGN_LOADER, cases[i].loader);
        assert_int_equal(outcome.status, 1); /* the plug-in accepts it */
        assert_true((strstr(outcome.output, alone) != NULL) == cases[i].told);
        assert_true((strstr(outcome.output, "kvant: KVANT0 is CUDA0\n") != NULL) == cases[i].used);
    }
    outcome = run("", KVANT_TEST_FOREIGN_LOADER, "0.20.0 old"); /* there is no GPU */
    assert_int_equal(outcome.status, 1);
    assert_int_equal(lines_of(&outcome), 0);
}

/* ggml reads one path of a back end. The plug-in loads the back end that this path named before. */
CASE(another_back_end_is_loaded_first)
{
    static const char cuda[] =
        "KVANT_VERBOSE=1 KVANT_BACKEND_PATH=" KVANT_TEST_CUDA " " KVANT_TEST_DRIVER;
    static const char *const wrong[] = { "/no/where.so", "/dev/null", KVANT_TEST_PLUGIN };
    struct outcome outcome = run(cuda, KVANT_TEST_PROBE, "f16 on");

    assert_int_equal(outcome.status, 0);
    assert_true(says(&outcome, "KVANT0 is CUDA0"));
    assert_true(says(&outcome, "30 of 30 layers"));
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        char environment[512];
        snprintf(environment, sizeof(environment), "KVANT_BACKEND_PATH=%s", wrong[i]);
        outcome = run(environment, KVANT_TEST_PROBE, "f16 on");
        assert_int_equal(outcome.status, 0);
        assert_true(says(&outcome, "30 of 30 layers"));
        if (i < 2)
            assert_true(says(&outcome, "is not loaded; set the path of a back end"));
        assert_int_equal(lines_of(&outcome), i < 2 ? 2 : 1);
    }
    assert_int_equal(run("KVANT_BACKEND_PATH=", KVANT_TEST_PROBE, "f16 on").status, 0);
}

/* Every row is known: the plug-in compares as many rows as this list has. */
CASE(a_row_that_differs_is_named)
{
    static const char *const rows[] = {
        "type f32",
        "type f16",
        "type i32",
        "type i64",
        "type bf16",
        "tensor: type",
        "tensor: ne[0]",
        "tensor: ne[1]",
        "tensor: ne[3]",
        "tensor: nb[0]",
        "tensor: nb[2]",
        "tensor: op",
        "tensor: view_src",
        "tensor: view_offs",
        "tensor: name",
        "tensor: data",
        "tensor: buffer",
        "operations with the same number",
        "operation NONE",
        "operation VIEW",
        "operation PERMUTE",
        "operation RESHAPE",
        "operation TRANSPOSE",
        "operation FLASH_ATTN_EXT",
        "FLASH_ATTN_EXT: sources in order",
        "FLASH_ATTN_EXT: parameters in order",
        "operation ROPE",
        "ROPE: sources in order",
        "ROPE: n_dims",
        "ROPE: mode",
        "ROPE: n_ctx_orig",
        "ROPE: frequencies in order",
        "operation SET_ROWS",
        "SET_ROWS: sources in order",
        "flag of a node to be computed",
        "graph: size",
        "graph: n_nodes",
        "graph: nodes",
        "operation MUL_MAT_ID",
        "buffer type: device",
        "buffer type: name",
        "buffer type: alloc_buffer",
        "buffer type: alignment",
        "buffer type: max_size",
        "buffer type: alloc_size",
        "buffer type: is_host",
        "buffer: functions",
        "buffer: buffer type",
        "buffer: context",
        "buffer: size",
        "buffer: usage",
        "buffer: creation",
        "buffer: get_base",
        "buffer: init_tensor",
        "buffer: clear",
        "buffer: reset",
        "buffer: memset_tensor",
        "buffer: set_tensor",
        "buffer: get_tensor",
        "buffer: cpy_tensor",
        "buffer: free_buffer",
        "back end: guid",
        "back end: device",
        "back end: name",
        "back end: synchronize",
        "back end: graph_compute",
        "back end: event_record",
        "back end: event_wait",
        "back end: free",
        "device: get_props",
        "size of a device's properties",
        "device: name",
        "device: description",
        "device: memory",
        "device: type",
        "device: init_backend",
        "device: buffer type",
        "device: host buffer type",
        "device: buffer from memory",
        "device: supports_op",
        "device: supports_buft",
        "device: offload_op",
        "device: registry",
        "registry: name",
        "registry: number of devices",
        "registry: device",
        "registry: address",
        "device's properties: name",
        "device's properties: type",
        "version of the back-end API",
        "size of a tensor",
        "tensors in a context of ours",
    };
    const size_t n = sizeof(rows) / sizeof(rows[0]);
    char text[256];
    struct outcome outcome = run("KVANT_VERBOSE=1", KVANT_TEST_FOREIGN_LOADER, "0.30.0 whole");

    snprintf(text, sizeof(text), ": all %zu facts about its layout are as expected", n);
    assert_int_equal(outcome.status, 1);
    assert_true(says(&outcome, text));
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(setenv("FOREIGN_ROW", rows[i], 1), 0);
        /* The plug-in leaks a buffer that it does not know, because only ggml could free it. */
        outcome = run("ASAN_OPTIONS=detect_leaks=0", KVANT_TEST_FOREIGN_LOADER, "0.25.1 row");
        snprintf(text, sizeof(text), "than this plug-in knows: %s is ", rows[i]);
        if (outcome.status != 0 || !says(&outcome, text))
            print_error("%s: status %d\n", rows[i], outcome.status);
        assert_int_equal(outcome.status, 0);
        assert_true(says(&outcome, text));
    }
    unsetenv("FOREIGN_ROW");
}

RUN_CASES(NULL, NULL)
