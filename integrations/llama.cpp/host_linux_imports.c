/* host_linux_imports.c - the imports of the process's modules, for host.h on Linux. A module calls
 * a function of a library through a pointer that the loader fills in (an entry of its global offset
 * table). This file finds these pointers by the modules' relocations and writes others. */
#define _GNU_SOURCE /* dl_iterate_phdr, RTLD_DEFAULT */

#include "host.h"

#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { OF_A_CALL = R_X86_64_JUMP_SLOT, OF_AN_ADDRESS = R_X86_64_GLOB_DAT };
#elif defined(__aarch64__)
enum { OF_A_CALL = R_AARCH64_JUMP_SLOT, OF_AN_ADDRESS = R_AARCH64_GLOB_DAT };
#else
enum { OF_A_CALL = -1, OF_AN_ADDRESS = -1 };
#endif

/* Relocation types and symbols of 64-bit systems; on other systems nothing is found. */
#define TYPE_OF(info) ((int)ELF64_R_TYPE(info))
#define SYMBOL_OF(info) ELF64_R_SYM(info)

/* A pointer of a module to an imported function. */
typedef struct place {
    _Atomic(void *) *at;
    size_t import;
    const char *module;
    int type;          /* of the relocation */
    bool is_protected; /* the loader has made its page read-only */
} place;

typedef struct search {
    kvp_import *imports;
    size_t n;
    place *places;
    size_t n_places, room;
    const char *why;
} search;

/* The tables of a module that relocations need. */
typedef struct module {
    const struct dl_phdr_info *info;
    const ElfW(Sym) * symbols;
    const char *strings;
    const ElfW(Rela) * relocations[2];
    size_t bytes[2];
    uintptr_t protected_first, protected_end;
} module;

static const void *address_of(const struct dl_phdr_info *info, uintptr_t at)
{
    /* glibc has added the module's address already, other C libraries have not */
    return (const void *)(at < info->dlpi_addr ? info->dlpi_addr + at : at);
}

static void read_dynamic(module *m, const ElfW(Dyn) * entry)
{
    for (; entry->d_tag != DT_NULL; entry++) {
        const void *at = address_of(m->info, entry->d_un.d_ptr);
        if (entry->d_tag == DT_SYMTAB)
            m->symbols = at;
        else if (entry->d_tag == DT_STRTAB)
            m->strings = at;
        else if (entry->d_tag == DT_JMPREL)
            m->relocations[0] = at;
        else if (entry->d_tag == DT_PLTRELSZ)
            m->bytes[0] = entry->d_un.d_val;
        else if (entry->d_tag == DT_RELA)
            m->relocations[1] = at;
        else if (entry->d_tag == DT_RELASZ)
            m->bytes[1] = entry->d_un.d_val;
    }
}

static bool read_module(module *m, const struct dl_phdr_info *info)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);

    *m = (module){ .info = info };
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        const uintptr_t first = info->dlpi_addr + header->p_vaddr;
        if (header->p_type == PT_DYNAMIC)
            read_dynamic(m, (const ElfW(Dyn) *)first);
        if (header->p_type == PT_GNU_RELRO) {
            m->protected_first = first / page * page;
            m->protected_end = (first + header->p_memsz) / page * page;
        }
    }
    return m->symbols != NULL && m->strings != NULL;
}

static void add_place(search *s, const module *m, const ElfW(Rela) * r, size_t import)
{
    const uintptr_t at = m->info->dlpi_addr + r->r_offset;
    const size_t room = s->room > 0 ? 2 * s->room : 16;
    place *more = s->places;

    if (s->n_places == s->room) {
        more = realloc(s->places, room * sizeof(*more));
        if (more == NULL)
            s->why = "out of memory";
        if (more == NULL)
            return;
        s->places = more;
        s->room = room;
    }
    more[s->n_places++] =
        (place){ .at = (_Atomic(void *) *)at,
                 .import = import,
                 .module = m->info->dlpi_name,
                 .type = TYPE_OF(r->r_info),
                 .is_protected = at >= m->protected_first && at < m->protected_end };
}

static int see_module(struct dl_phdr_info *info, size_t size, void *user)
{
    search *s = user;
    module m;

    (void)size;
    if (!read_module(&m, info))
        return 0;
    for (int table = 0; table < 2; table++)
        for (size_t i = 0; i < m.bytes[table] / sizeof(ElfW(Rela)); i++) {
            const ElfW(Rela) *r = &m.relocations[table][i];
            const ElfW(Sym) *symbol = &m.symbols[SYMBOL_OF(r->r_info)];
            if (SYMBOL_OF(r->r_info) == 0 || symbol->st_shndx != SHN_UNDEF)
                continue;
            for (size_t k = 0; k < s->n; k++)
                if (strcmp(m.strings + symbol->st_name, s->imports[k].name) == 0)
                    add_place(s, &m, r, k);
        }
    return s->why != NULL;
}

/* The function that the module gets by this name: of the whole process, or of the libraries that
 * the module was linked with. */
static void *resolve(const char *file, const char *name)
{
    void *library, *found = dlsym(RTLD_DEFAULT, name);

    if (found != NULL || file == NULL || file[0] == '\0')
        return found;
    library = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
    found = library != NULL ? dlsym(library, name) : NULL;
    if (library != NULL)
        dlclose(library);
    return found;
}

static void check_place(search *s, const place *p)
{
    kvp_import *import = &s->imports[p->import];
    void *found = resolve(p->module, import->name);

    if (found == NULL)
        s->why = "a module lacks a function that it imports";
    else if (p->type != OF_A_CALL && p->type != OF_AN_ADDRESS)
        s->why = "a module keeps the functions' addresses elsewhere";
    else if (import->theirs != NULL && import->theirs != found)
        s->why = "the process has several libraries with these functions";
    import->theirs = found;
}

/* The loader's lock is held while it goes through the modules, so functions are looked up
 * afterwards. */
static bool find(search *s)
{
    for (size_t i = 0; i < s->n; i++)
        s->imports[i].theirs = NULL;
    if (OF_A_CALL < 0 || sizeof(void *) != sizeof(uint64_t))
        s->why = "this processor's modules are not known";
    else
        dl_iterate_phdr(see_module, s);
    for (size_t i = 0; i < s->n_places && s->why == NULL; i++)
        check_place(s, &s->places[i]);
    return s->why == NULL;
}

bool kvp_host_find_imports(kvp_import *imports, size_t n, const char **why)
{
    search s = { .imports = imports, .n = n };
    const bool found = find(&s);

    free(s.places);
    *why = s.why;
    return found;
}

static bool allow(const place *p, int access)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)p->at / page * page;

    return !p->is_protected || mprotect((void *)at, page, access) == 0;
}

bool kvp_host_replace_imports(kvp_import *imports, size_t n)
{
    search s = { .imports = imports, .n = n };
    bool may = find(&s);

    for (size_t i = 0; i < s.n_places && may; i++)
        may = allow(&s.places[i], PROT_READ | PROT_WRITE);
    for (size_t i = 0; i < s.n_places && may; i++)
        atomic_store(s.places[i].at, imports[s.places[i].import].ours);
    for (size_t i = 0; i < s.n_places; i++)
        allow(&s.places[i], PROT_READ);
    free(s.places);
    return may;
}
