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
#define REQUIRED(member, name, result, parameters) { #name, &api->member, true },
#define OPTIONAL(member, name, result, parameters) { #name, &api->member, false },
        KVP_GGML_FUNCTIONS(REQUIRED) KVP_GGML_FURTHER(OPTIONAL)
#undef REQUIRED
#undef OPTIONAL
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
