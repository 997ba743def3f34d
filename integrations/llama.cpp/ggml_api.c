/* ggml_api.c - see ggml_api.h: finds the symbols of the loading ggml, identifies its generation,
 * checks its tensors, or refuses.
 *
 * Three independent facts must agree: the version that ggml states, the presence of the function
 * that API 3 added, and tensors that ggml builds here and that abi.h must read correctly. An
 * untested version needs KVANT_UNTESTED_GGML=1; then the tables of buffers and devices are checked
 * too.
 */
#define _GNU_SOURCE /* dladdr1, RTLD_DL_LINKMAP */

#include "ggml_api.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

#include "log.h"
#include "settings.h"

kvp_ggml kvp_api;

/* What the integration tests run against. A patch release keeps the layouts, so two numbers are
 * compared. */
static const struct tested {
    const char *ggml; /* major.minor */
    int api;
} tested_versions[] = {
    { "0.25", 2 },
    { "0.26", 3 },
};

#define TESTED_VERSIONS "ggml 0.25 (llama.cpp v0.5.0, API 2) and ggml 0.26 (llama.cpp b11434, API 3)"

static void *open_caller(const void *caller)
{
    Dl_info info;
    void *found = NULL;
    const struct link_map *map;

    if (!dladdr1(caller, &info, &found, RTLD_DL_LINKMAP) || found == NULL)
        return NULL;
    map = found;
    /* The main program has no name in the link map; NULL is how dlopen calls it. */
    return dlopen(map->l_name[0] ? map->l_name : NULL, RTLD_LAZY | RTLD_NOLOAD);
}

/* POSIX lets dlsym's object pointer be read as a function pointer; ISO C has no cast for it. */
static bool lookup(void *library, const char *name, void *slot)
{
    void *symbol = dlsym(library, name);

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
        { "ggml_backend_dev_init", &api->dev_init, false },
        { "ggml_backend_dev_backend_reg", &api->dev_backend_reg, false },
        { "ggml_backend_reg_get_proc_address", &api->reg_get_proc_address, false },
        { "ggml_backend_reg_by_name", &api->reg_by_name, false },
        { "ggml_graph_next_uid", &api->graph_next_uid, false },
    };

    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        if (!lookup(library, symbols[i].name, symbols[i].slot) && symbols[i].required) {
            kvp_error("ggml %s does not export %s; tested: " TESTED_VERSIONS, api->version, symbols[i].name);
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

static bool is_tested(const kvp_ggml *api)
{
    for (size_t i = 0; i < sizeof(tested_versions) / sizeof(tested_versions[0]); i++)
        if (same_minor(api->version, tested_versions[i].ggml) && api->api == tested_versions[i].api)
            return true;
    return false;
}

/* True when the user wants an untested version nevertheless. */
static bool accept_untested(const kvp_ggml *api, const char *commit)
{
    char err[256] = "";
    bool accept;

    if (!kvp_settings_read_switch("KVANT_UNTESTED_GGML", false, &accept, err, sizeof(err)))
        kvp_error("%s", err);
    else if (accept)
        kvp_error("warning: ggml %s (commit %s, looks like back-end API %d) was not tested with this plug-in; tested: "
                  TESTED_VERSIONS,
                  api->version, commit, api->api);
    else
        kvp_error("found ggml %s (commit %s, looks like back-end API %d), which this plug-in was not tested with; "
                  "tested: " TESTED_VERSIONS "; KVANT_UNTESTED_GGML=1 tries it",
                  api->version, commit, api->api);
    return accept;
}

/* The generation shows in a function that API 3 brought; the version should be one it was tested
 * with. */
static bool identify(void *library, kvp_ggml *api)
{
    const char *(*version)(void);
    const char *(*commit)(void);

    if (!lookup(library, "ggml_version", &version)) {
        kvp_error("the program that loads the plug-in exports no ggml (no ggml_version), it was linked statically "
                  "or is too old; tested: " TESTED_VERSIONS);
        return false;
    }
    api->version = version();
    api->api = dlsym(library, "ggml_backend_buft_alloc_buffer_n") != NULL ? 3 : 2;
    api->tested = is_tested(api);
    return api->tested ||
           accept_untested(api, lookup(library, "ggml_commit", &commit) ? commit() : "unknown");
}

static int32_t find_op(const kvp_ggml *api, const char *name)
{
    for (int32_t op = 0; op < ABI_OP_COUNT; op++)
        if (strcmp(api->op_name(op), name) == 0)
            return op;
    kvp_error("ggml %s has no operation %s; tested: " TESTED_VERSIONS, api->version, name);
    return -1;
}

static bool find_ops(kvp_ggml *api)
{
    const struct {
        const char *name;
        int32_t *slot;
    } ops[] = {
        { "NONE", &api->op.none },
        { "VIEW", &api->op.view },
        { "PERMUTE", &api->op.permute },
        { "RESHAPE", &api->op.reshape },
        { "TRANSPOSE", &api->op.transpose },
        { "SET_ROWS", &api->op.set_rows },
        { "FLASH_ATTN_EXT", &api->op.flash_attn_ext },
        { "ROPE", &api->op.rope },
        { "MUL_MAT_ID", &api->op.mul_mat_id },
    };

    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        *ops[i].slot = find_op(api, ops[i].name);
        if (*ops[i].slot < 0)
            return false;
    }
    return true;
}

/* Builds a view and an operation with ggml's own functions and reads them through abi.h. Only data
 * is looked at: calling through a wrong table could crash, reading a wrong offset inside a tensor
 * cannot. */
static bool tensors_match(const kvp_ggml *api, abi_context *context)
{
    abi_tensor *base = api->new_tensor_3d(context, ABI_TYPE_F16, 32, 8, 2);
    abi_tensor *view = api->view_3d(context, base, 16, 4, 2, base->nb[1], base->nb[2], 2 * base->nb[1]);
    abi_tensor *rows = api->new_tensor_3d(context, ABI_TYPE_F32, 32, 3, 2);
    abi_tensor *index = api->new_tensor_1d(context, ABI_TYPE_I64, 3);
    abi_tensor *node = api->set_rows(context, base, rows, index);

    api->set_name(base, "cache_k_l0");
    return base->type == ABI_TYPE_F16 && base->ne[0] == 32 && base->ne[1] == 8 && base->ne[2] == 2 &&
           base->ne[3] == 1 && base->nb[0] == 2 && base->nb[1] == 64 && base->nb[2] == 512 &&
           base->op == api->op.none && base->view_src == NULL && strcmp(base->name, "cache_k_l0") == 0 &&
           view->op == api->op.view && view->view_src == base && view->view_offs == 128 && view->ne[1] == 4 &&
           node->op == api->op.set_rows && node->view_src == base && node->src[0] == rows &&
           node->src[1] == index && node->src[3] == NULL && index->type == ABI_TYPE_I64;
}

static bool check_tensors(const kvp_ggml *api)
{
    /* ggml counts a header of 32 bytes for each object of a context. */
    const size_t overhead = sizeof(abi_tensor) + 32;
    abi_init_params params = { .mem_size = 16 * overhead, .mem_buffer = NULL, .no_alloc = true };
    bool match = api->tensor_overhead() == overhead;

    if (match) {
        abi_context *context = api->init(params);
        match = context != NULL && tensors_match(api, context);
        if (context != NULL)
            api->free(context);
    }
    if (!match)
        kvp_error("ggml %s lays tensors out differently from the tested builds; tested: " TESTED_VERSIONS,
                  api->version);
    return match;
}

static void *no_base(abi_buffer *buffer)
{
    return buffer->context;
}

/* The tables that a version number would vouch for, on objects whose fields ggml's own functions
 * tell: a buffer that ggml makes of ours, and the CPU's device where there is one. Nothing is
 * called through a table before its place is known. */
static bool tables_match(const kvp_ggml *api)
{
    static char memory[64];
    const abi_buffer_iface iface = { .get_base = no_base };
    abi_buft *buft = api->cpu_buffer_type();
    abi_buffer *buffer = api->buffer_init(buft, iface, memory, sizeof(memory));
    abi_device *cpu = api->dev_by_type != NULL ? api->dev_by_type(ABI_DEVICE_CPU) : NULL;
    abi_reg *reg = cpu != NULL && api->dev_backend_reg != NULL ? api->dev_backend_reg(cpu) : NULL;

    if (buffer == NULL || buffer->buft != buft || buffer->context != memory || buffer->size != sizeof(memory) ||
        buffer->iface.get_base != no_base || api->buffer_size(buffer) != sizeof(memory))
        return false; /* and leaks it: it cannot be freed through a table that is not ours */
    api->buffer_free(buffer);
    return reg == NULL || (cpu->reg == reg && reg->api_version == api->api);
}

static bool check_tables(const kvp_ggml *api)
{
    if (api->tested || tables_match(api))
        return true;
    kvp_error("ggml %s lays buffers or devices out differently from the tested builds; tested: " TESTED_VERSIONS,
              api->version);
    return false;
}

bool kvp_ggml_load(const void *caller)
{
    void *library = open_caller(caller);
    kvp_ggml api = { 0 };
    bool ok;

    if (library == NULL) {
        kvp_error("cannot tell which ggml loads the plug-in; tested: " TESTED_VERSIONS);
        return false;
    }
    ok = identify(library, &api) && lookup_all(library, &api) && find_ops(&api) && check_tensors(&api) &&
         check_tables(&api);
    /* The caller stays loaded: it is calling us. Only our reference is returned. */
    dlclose(library);
    if (ok)
        kvp_api = api;
    return ok;
}
