/* test_host.c - the layer between the plug-in and the operating system
 * (integrations/llama.cpp/host.h): memory that is reserved, committed, cleared and counted, and the
 * model that a process has mapped. */
#include "../../integrations/llama.cpp/host.h"
#include "../../integrations/llama.cpp/model_file.h"
#include "testing.h"

#define PAGE 65536u /* a multiple of every system's page */
#define BYTES (64u * PAGE)

static bool is_filled(const char *at, size_t n, char value)
{
    for (size_t i = 0; i < n; i++)
        if (at[i] != value)
            return false;
    return true;
}

CASE(only_written_pages_are_resident)
{
    char *memory = kvp_host_reserve(BYTES);
    assert_non_null(memory);
    kvp_host_refuse_huge_pages(memory, BYTES);
    assert_int_equal(kvp_host_resident(memory, BYTES), 0);
    assert_true(kvp_host_commit(memory, BYTES / 2));
    assert_int_equal(kvp_host_resident(memory, BYTES), 0);
    memset(memory + PAGE, 1, 2 * PAGE);
    assert_int_equal(kvp_host_resident(memory, BYTES), 2 * PAGE);
    kvp_host_release(memory, BYTES);
}

/* The cleared part begins and ends within a page. Its neighbours keep what they have. */
CASE(cleared_memory_is_zero)
{
    char *memory = kvp_host_reserve(BYTES);
    const size_t first = 3 * PAGE + 100, bytes = 5 * PAGE + 77;
    assert_non_null(memory);
    assert_true(kvp_host_commit(memory, 12 * PAGE));
    memset(memory, 1, 12 * PAGE);
    kvp_host_clear(memory + first, bytes);
    assert_int_equal(kvp_host_resident(memory, BYTES) < 8 * PAGE, true);
    assert_true(kvp_host_commit(memory + first, bytes));
    assert_true(is_filled(memory, first, 1));
    assert_true(is_filled(memory + first, bytes, 0));
    assert_true(is_filled(memory + first + bytes, 12 * PAGE - first - bytes, 1));
    kvp_host_clear(memory + 5, 11); /* within a page */
    assert_true(is_filled(memory, 5, 1) && is_filled(memory + 5, 11, 0) && memory[16] == 1);
    kvp_host_clear(memory + 20 * PAGE + 5, 2 * PAGE);    /* was never committed */
    assert_true(kvp_host_commit(memory + first, bytes)); /* stays as it is */
    memory[first] = 2;
    assert_true(kvp_host_commit(memory + first, bytes));
    assert_int_equal(memory[first], 2);
    kvp_host_release(memory, BYTES);
}

CASE(a_mapped_model_is_found)
{
    char folder[] = "/tmp/kvant-host-XXXXXX", path[128], found[KVP_MODEL_PATH], text[2][96];
    int file;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/ein Modell ß Ж.gguf", folder);
    assert_true(kvant_os_create(path, &file));
    assert_true(kvant_os_write(file, "GGUF and more", 13));
    kvp_host_file_state(path, text[0], sizeof text[0]);
    const void *map = kvant_os_map_file(file, 13);
    assert_non_null(map);
    assert_true(kvp_find_model(found));
    assert_string_equal(kvant_os_file_name(found), kvant_os_file_name(path));
    assert_true(kvp_host_is_file(found));
    assert_false(kvp_host_is_file(folder));
    kvant_os_unmap(map, 13);
    assert_false(kvp_find_model(found));
    assert_true(kvant_os_write(file, "more", 4));
    assert_true(kvant_os_close(file));
    kvp_host_file_state(path, text[1], sizeof text[1]);
    assert_string_not_equal(text[0], text[1]);
    FILE *in = kvp_host_open(path, false);
    assert_non_null(in);
    assert_int_equal(kvp_host_file_bytes(in), 17);
    fclose(in);
    assert_true(kvant_os_remove(path));
    remove(folder);
}

CASE(the_machine_has_memory)
{
    size_t available = 0, total = 0;
    kvant_os_memory(&available, &total);
    assert_true(available > 0 && total >= available);
}

RUN_CASES(NULL, NULL)
