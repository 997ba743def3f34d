/* ggml_api.c - see ggml_api.h: finds the symbols of the loading ggml and lets ggml_tables.c compare
 * its tables, or refuses. */
#include "ggml_api.h"

#include <stdio.h>
#include <string.h>

#include "ggml_tables.h"
#include "host.h"
#include "log.h"
#include "settings.h"

kvp_ggml kvp_api;

/* The newest ggml whose builds were tried (bench/results/versions.csv). The plug-in prints a line
 * for a newer one. */
enum { LAST_MINOR = 27 };
#define TRIED_NUMBERS "0.10 to 0.27"
#define TRIED_VERSIONS "ggml " TRIED_NUMBERS

/* The versions that all integration tests run against; KVANT_STRICT_GGML=1 takes no other. A patch
 * release keeps the layouts, so two numbers are compared. */
static const char *const tested_versions[] = { "0.25", "0.26" };
#define TESTED_VERSIONS "ggml 0.25 and 0.26"

/* ISO C has no cast from an object pointer to a function pointer. */
static bool lookup(void *library, const char *name, void *slot)
{
    void *symbol = kvant_os_symbol(library, name);

    memcpy(slot, &symbol, sizeof(symbol));
    return symbol != NULL;
}

static bool lookup_all(void *library, kvp_ggml *api)
{
    const struct {
        const char *name;
        void *slot;
        bool required;
    } symbols[] = {
        { "ggml_backend_buffer_init", &api->buffer_init, true },
        { "ggml_backend_buft_is_host", &api->buft_is_host, true },
        { "ggml_backend_cpu_buffer_type", &api->cpu_buffer_type, true },
        { "ggml_graph_n_nodes", &api->graph_n_nodes, true },
        { "ggml_graph_node", &api->graph_node, true },
        { "ggml_nbytes", &api->nbytes, true },
        { "ggml_fp16_to_fp32_row", &api->fp16_to_fp32_row, true },
        { "ggml_fp32_to_fp16_row", &api->fp32_to_fp16_row, true },
        { "ggml_op_name", &api->op_name, true },
        { "ggml_tensor_overhead", &api->tensor_overhead, true },
        { "ggml_init", &api->init, true },
        { "ggml_free", &api->free, true },
        { "ggml_new_tensor_1d", &api->new_tensor_1d, true },
        { "ggml_new_tensor_3d", &api->new_tensor_3d, true },
        { "ggml_view_3d", &api->view_3d, true },
        { "ggml_set_name", &api->set_name, true },
        { "ggml_set_rows", &api->set_rows, true },
        { "ggml_rope_ext_inplace", &api->rope_ext_inplace, true },
        { "ggml_custom_4d", &api->custom_4d, true },
        { "ggml_new_graph", &api->new_graph, true },
        { "ggml_graph_overhead", &api->graph_overhead, true },
        { "ggml_build_forward_expand", &api->build_forward_expand, true },
        { "ggml_backend_graph_compute", &api->graph_compute, true },
        { "ggml_backend_free", &api->backend_free, true },
        { "ggml_backend_buffer_free", &api->buffer_free, true },
        { "ggml_backend_buffer_get_size", &api->buffer_size, true },
        { "ggml_backend_dev_by_type", &api->dev_by_type, false },
        { "ggml_backend_dev_count", &api->dev_count, false },
        { "ggml_backend_dev_get", &api->dev_get, false },
        { "ggml_backend_dev_init", &api->dev_init, false },
        { "ggml_backend_dev_backend_reg", &api->dev_backend_reg, false },
        { "ggml_backend_reg_get_proc_address", &api->reg_get_proc_address, false },
        { "ggml_backend_reg_by_name", &api->reg_by_name, false },
        { "ggml_backend_load", &api->backend_load, false },
        { "ggml_graph_next_uid", &api->graph_next_uid, false },
    };

    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        if (!lookup(library, symbols[i].name, symbols[i].slot) && symbols[i].required) {
            kvp_error("ggml %s does not export %s, which this plug-in needs; kvant "
                      "runs with " TRIED_VERSIONS,
                      api->version, symbols[i].name);
            return false;
        }
    }
    return true;
}

static bool same_minor(const char *version, const char *minor)
{
    size_t n = strlen(minor);

    return strncmp(version, minor, n) == 0 && (version[n] == '\0' || version[n] == '.');
}

static bool is_tested(const char *version)
{
    for (size_t i = 0; i < sizeof(tested_versions) / sizeof(tested_versions[0]); i++)
        if (same_minor(version, tested_versions[i]))
            return true;
    return false;
}

static bool is_newer(const char *version)
{
    unsigned major = 0, minor = 0;

    return sscanf(version, "%u.%u", &major, &minor) != 2 || major > 0 || minor > LAST_MINOR;
}

/* Whether the user accepts this version. KVANT_STRICT_GGML=1 accepts only versions that all tests
 * run with. */
static bool is_wanted(const char *version)
{
    char err[256] = "";
    bool strict;

    if (!kvp_settings_read_switch("KVANT_STRICT_GGML", false, &strict, err, sizeof(err)))
        kvp_error("%s", err);
    else if (strict && !is_tested(version))
        kvp_error("found ggml %s, but KVANT_STRICT_GGML=1 accepts " TESTED_VERSIONS
                  " only; unset it",
                  version);
    else
        return true;
    return false;
}

static bool identify(void *library, kvp_ggml *api)
{
    const char *(*version)(void);
    bool (*may_expand)(int32_t op);

    if (!lookup(library, "ggml_version", &version)) {
        kvp_error("the program that loads the plug-in exports no ggml (no ggml_version): it was "
                  "linked statically or is too old; kvant runs with " TRIED_VERSIONS);
        return false;
    }
    api->version = version();
    api->newer = is_newer(api->version);
    api->gpus = lookup(library, "ggml_op_alloc_size_may_expand", &may_expand);
    return is_wanted(api->version);
}

static bool check_tables(void *library, kvp_ggml *api)
{
    char row[256] = "";

    if (kvp_ggml_tables_match(library, api, row, sizeof(row)))
        return true;
    kvp_error(
        "ggml %s has another layout than this plug-in knows: %s; kvant runs with " TRIED_VERSIONS
        " and with newer versions of the same layout",
        api->version, row);
    return false;
}

bool kvp_ggml_load(const void *caller)
{
    void *library = kvp_host_library_of(caller);
    kvp_ggml api = { 0 };
    bool ok;

    if (library == NULL) {
        kvp_error("cannot find the ggml that loads the plug-in; kvant runs with " TRIED_VERSIONS);
        return false;
    }
    ok = identify(library, &api) && lookup_all(library, &api) && check_tables(library, &api);
    /* The caller stays loaded: it is calling us. Only our reference is returned. */
    kvant_os_close_library(library);
    if (ok)
        kvp_api = api;
    return ok;
}

void kvp_ggml_report(void)
{
    if (kvp_api.newer)
        kvp_info("ggml %s is newer than the versions that kvant was tried with (" TRIED_NUMBERS
                 "); all %d facts about its layout that kvant relies on hold, so it runs",
                 kvp_api.version, kvp_api.n_rows);
    kvp_note("ggml %s, back-end API %d: all %d facts about its layout are as expected",
             kvp_api.version, kvp_api.api, kvp_api.n_rows);
}
