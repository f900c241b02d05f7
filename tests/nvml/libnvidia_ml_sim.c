/*
 * A simulated libnvidia-ml.so.1, steered by a text file, for tests and demonstrations on machines without a GPU.
 * Structure layouts, symbol names and version words follow nvidia-ml-py, the client that loads it.
 *
 * SCENARIO  The file named by the environment variable NVML_SIM_SCENARIO. Lines "key = value", "#" starts a comment,
 * the last line for a key wins. It is read again at the next call after it was replaced or edited (device, inode,
 * size or mtime differ); replace it by rename, so that no half-written file is seen. "gpuN.key" speaks for physical
 * GPU N and wins over "key", which speaks for all; what neither names comes from the part's defaults (table DEFAULTS).
 * File missing or unset: init answers 9 (driver not loaded); gone later: the last one read stays in force.
 *
 * GPUs     gpus = 8            physical GPUs (at most 16)
 *          order = 0,1,3,4     physical GPUs now visible, in NVML's order; a handle of one left out answers 15
 *          order_latched = 1   count and order change at the next first init only, as with the real library
 *          profile = h100      h100 | a100 | v100 (retired pages, no row remapping) | b200 (NVLink 5 fields) |
 *                              gb200 (a b200 in an NVLink domain of several nodes)
 *          node = 0            mixed into UUIDs and serials, so that several simulated nodes differ
 * Values   12, 0xff, -3        what NVML returns, in NVML's units (mW, mJ, bytes, MHz, KiB/s, percent)
 *          40+2                BASE+STEP: 40 on GPU 0, 42 on GPU 1, ...
 *          0~500               BASE~RATE: grows by 500 a second of uptime (monotone over processes)
 *          na                  the sentinel: all bits one (UINT_MAX, 2^64-1)
 *          unsupported         the call answers 3;  error:N  the call answers N
 * Keys     every name in the table DEFAULTS below, and
 *          nvlinkL_state, nvlinkL_replay, ...   one link's value (nvlink_state etc. speak for all links)
 *          migK_uuid, migK_gi      one MIG device's value
 *          processes = PID:BYTES[:GI:CI], ...   (BYTES may be na)
 *          order, node, uuid, serial, pci (00000000:18:00.0), fabric_cluster_uuid (32 hex digits)
 *          field.ID = value    overrides one field value; 1.5, nan or inf make it a double
 *          field_fail.ID = N   that field's own return code
 *          arbitrary = counter|random   what the part and the scenario do not say is answered all the same, with an
 *                              arbitrary number (from 5000000 on, or any 64 bits) of each type in turn: fields, and
 *                              the counts of NVLinks, MIG devices, processes and (only then) GPUs
 *          device_count = N    what nvmlDeviceGetCount answers, whatever the list has
 * Energy   energy + power_usage x uptime, summed up inside one process so that it never falls; frozen = T lets time
 *          stand still at T seconds of uptime (frozen = 1 is enough to stop a counter that is already running).
 * Library  driver_version is the kernel module's. library_version (default: the same) is this library's and stays as
 *          the process first saw it, like a mapped file; where the two differ, init answers 18.
 *
 * FAULTS   KIND, KIND.FUNCTION, gpuN.KIND, gpuN.KIND.FUNCTION = value; the longest of these that matches wins and a
 * GPU wins over a function. FUNCTION is a symbol with or without _vN, may hold * and ?; "init" stands for every init
 * symbol. 0 as value exempts. A fault of a GPU also meets the look-up of its handle. nvmlErrorString has no faults.
 *          delay = SECONDS     sleep first
 *          crash = segv
 *          dstate = PATH       write and fsync PATH first: on a frozen file system the process is in D state,
 *                              unkillable until thaw; then the call goes on
 *          hang = 1            pause() for ever; only a signal that kills ends it
 *          fail = CODE         return this code: 1 uninitialized, 3 not supported, 4 no permission, 6 not found,
 *                              9 driver not loaded, 10 timeout, 13 as a symbol that is absent, 15 lost, 16 reset
 *                              required, 18 version mismatch, 999 unknown
 *          no_driver = 1       every call but shutdown answers 9
 * They are tried in this order. Values and fail are looked up anew after a delay or a thaw. Without FUNCTION and gpuN
 * a fault meets every call, init and shutdown too.
 *
 * OBSERVE  trace = PATH        one line an init or shutdown that succeeds: "init PID USERS" (users after it)
 *          calls = PATH        one line a call: the symbol
 *
 * Not here: all that neither the product nor a test asks. Such a symbol is absent, which pynvml reports as
 * FunctionNotFound.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define STARTS(text, prefix) (strncmp(text, prefix, sizeof(prefix) - 1) == 0)

enum { MAX_GPUS = 16, MAX_MIGS = 8, MAX_LINKS = 36, MAX_ENTRIES = 4096, NAME = 96, SLOTS = 1024 };

typedef unsigned int uint;
typedef unsigned long long ull;

/* ---------------------------------------------------------------- return codes */

#define RETURNS(X) \
    X(OK, 0, "Success") \
    X(UNINITIALIZED, 1, "Uninitialized") \
    X(INVALID_ARGUMENT, 2, "Invalid Argument") \
    X(NOT_SUPPORTED, 3, "Not Supported") \
    X(NO_PERMISSION, 4, "Insufficient Permissions") \
    X(NOT_FOUND, 6, "Not Found") \
    X(INSUFFICIENT_SIZE, 7, "Insufficient Size") \
    X(DRIVER_NOT_LOADED, 9, "Driver Not Loaded") \
    X(TIMEOUT, 10, "Timeout") \
    X(IRQ_ISSUE, 11, "Interrupt Request Issue") \
    X(LIBRARY_NOT_FOUND, 12, "NVML Shared Library Not Found") \
    X(FUNCTION_NOT_FOUND, 13, "Function Not Found") \
    X(CORRUPTED_INFOROM, 14, "Corrupted infoROM") \
    X(GPU_IS_LOST, 15, "GPU is lost") \
    X(RESET_REQUIRED, 16, "GPU requires reset") \
    X(OPERATING_SYSTEM, 17, "The operating system has blocked the request.") \
    X(VERSION_MISMATCH, 18, "Driver/library version mismatch") \
    X(NO_DATA, 21, "No data") \
    X(ARGUMENT_VERSION_MISMATCH, 25, "Argument version mismatch") \
    X(UNKNOWN, 999, "Unknown Error")

#define AS_ENUM(name, code, text) name = code,
enum { RETURNS(AS_ENUM) };

/* ---------------------------------------------------------------- the parts' defaults
 * D(key, h100, a100, v100, b200). "" is worked out from other keys. Limits and ids are those of common parts; b200's
 * temperatures are illustrative. GPUs differ in what they show by the steps, so that a swapped index is seen. */

#define NO "unsupported"
#define DEFAULTS(D) \
    D(name, "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB", "NVIDIA B200") \
    D(pci_device_id, "0x233010de", "0x20b210de", "0x1db510de", "0x290110de") \
    D(numa_node, "", "", "", "") \
    D(vbios_version, "96.00.74.00.01", "92.00.45.00.03", "88.00.48.00.02", "97.00.5E.00.02") \
    D(inforom_checksum, "0x1d0c", "0x1d0b", "0x1d0a", "0x1d0d") \
    D(driver_version, "570.133.20", "570.133.20", "570.133.20", "570.133.20") \
    D(library_version, "", "", "", "") \
    D(cuda_version, "12080", "12080", "12080", "12080") \
    D(gsp_version, "", "", NO, "") \
    D(temperature, "35+1", "34+1", "38+1", "36+1") \
    D(memory_temperature, "45+1", "44+1", "43+1", "46+1") \
    D(margin_temperature, "", NO, NO, "") \
    D(threshold_shutdown, "95", "92", "90", "98") \
    D(threshold_slowdown, "89", "89", "87", "92") \
    D(threshold_memory_max, "95", "95", "85", "95") \
    D(threshold_gpu_max, "87", "85", "83", "90") \
    D(tlimit_shutdown, "-8", NO, NO, "-8") \
    D(tlimit_slowdown, "-2", NO, NO, "-2") \
    D(tlimit_memory_max, "0", NO, NO, "0") \
    D(tlimit_gpu_max, "0", NO, NO, "0") \
    D(power_usage, "300000+5000", "200000+5000", "150000+5000", "400000+5000") \
    D(power_limit_enforced, "700000", "400000", "300000", "1000000") \
    D(power_limit_default, "700000", "400000", "300000", "1000000") \
    D(power_limit_min, "200000", "100000", "150000", "200000") \
    D(power_limit_max, "700000", "400000", "300000", "1000000") \
    D(energy, "1000000000+1000000", "1000000000+1000000", "1000000000+1000000", "1000000000+1000000") \
    D(frozen, "0", "0", "0", "0") \
    D(performance_state, "0", "0", "0", "0") \
    D(clock_sm, "1900+5", "1350+5", "1480+5", "1905+5") \
    D(clock_memory, "2619", "1593", "877", "3996") \
    D(clock_max_sm, "1980", "1410", "1530", "1965") \
    D(clock_max_memory, "2619", "1593", "877", "3996") \
    D(throttle_reasons, "0", "0", "0", "0") \
    D(throttle_supported, "0x1ff", "0x1ff", "0x1ff", "0x1ff") \
    D(violation_power, "1000000+1000", "1000000+1000", "1000000+1000", "1000000+1000") \
    D(violation_sw_thermal, "0", "0", NO, "0") \
    D(violation_hw_thermal, "0", "0", NO, "0") \
    D(violation_power_brake, "0", "0", NO, "0") \
    D(utilization_gpu, "50+3", "50+3", "50+3", "50+3") \
    D(utilization_memory, "20+2", "20+2", "20+2", "20+2") \
    D(memory_total, "85520809984", "85899345920", "34359738368", "192265846784") \
    D(memory_reserved, "580911104", "1058013184", "469762048", "631242752") \
    D(memory_used, "10737418240+1073741824", "10737418240+1073741824", "1073741824+1073741824", "10737418240+1073741824") \
    D(ecc_mode, "1", "1", "1", "1") \
    D(ecc_pending, "1", "1", "1", "1") \
    ECC_DEFAULTS(D, volatile, "0") \
    ECC_DEFAULTS(D, aggregate, "0") \
    D(sram_aggregate_unc_parity, "0", NO, NO, "0") \
    D(sram_aggregate_unc_secded, "0", NO, NO, "0") \
    D(sram_aggregate_cor, "0+1", NO, NO, "0+1") \
    D(sram_volatile_unc_parity, "0", NO, NO, "0") \
    D(sram_volatile_unc_secded, "0", NO, NO, "0") \
    D(sram_volatile_cor, "0", NO, NO, "0") \
    D(sram_threshold_exceeded, "0", NO, NO, "0") \
    D(remapped_correctable, "0+1", "0+1", NO, "0+1") \
    D(remapped_uncorrectable, "0", "0", NO, "0") \
    D(remapped_pending, "0", "0", NO, "0") \
    D(remapped_failure, "0", "0", NO, "0") \
    D(retired_sbe, NO, NO, "0+1", NO) \
    D(retired_dbe, NO, NO, "0", NO) \
    D(retired_pending, NO, NO, "0", NO) \
    D(repair_channel_pending, "0", NO, NO, "0") \
    D(repair_tpc_pending, "0", NO, NO, "0") \
    D(repair_bank_pending, NO, NO, NO, "0") \
    D(unrepairable_memory, "0", NO, NO, "0") \
    D(recovery_action, "0", "0", "0", "0") \
    D(persistence_mode, "1", "1", "1", "1") \
    D(compute_mode, "0", "0", "0", "0") \
    D(virtualization_mode, "0", "0", "0", "0") \
    D(pcie_generation, "5", "4", "3", "5") \
    D(pcie_generation_max, "5", "4", "3", "5") \
    D(pcie_width, "16", "16", "16", "16") \
    D(pcie_width_max, "16", "16", "16", "16") \
    D(pcie_replay, "0+1", "0+1", "0+1", "0+1") \
    D(pcie_tx, "100000+1000", "100000+1000", "100000+1000", "100000+1000") \
    D(pcie_rx, "200000+1000", "200000+1000", "200000+1000", "200000+1000") \
    D(pcie_correctable, "0", "0", NO, "0") \
    D(pcie_non_fatal, "0", "0", NO, "0") \
    D(pcie_fatal, "0", "0", NO, "0") \
    D(pcie_tx_bytes, "0~102400000", "0~102400000", NO, "0~102400000") \
    D(pcie_rx_bytes, "0~204800000", "0~204800000", NO, "0~204800000") \
    D(nvlink_count, "18", "12", "6", "18") \
    D(nvlink_state, "1", "1", "1", "1") \
    D(nvlink_version, "6", "4", "2", "7") \
    D(nvlink_speed, "26562", "25781", "25781", "53125") \
    D(nvlink_remote_type, "2", "2", "0", "2") \
    D(nvlink_replay, "0", "0", "0", NO) \
    D(nvlink_recovery, "0", "0", "0", NO) \
    D(nvlink_crc_flit, "0", "0", "0", NO) \
    D(nvlink_data_tx, "0~100000", "0~100000", NO, "0~100000") \
    D(nvlink_data_rx, "0~100000", "0~100000", NO, "0~100000") \
    NVLINK5(AS_NVLINK5_DEFAULT, D) \
    D(fabric_state, "3", NO, NO, "3") \
    D(fabric_status, "0", NO, NO, "0") \
    D(fabric_clique, "0", NO, NO, "1") \
    D(fabric_health_mask, "0x2", NO, NO, "0x51aa") \
    D(fabric_health_summary, "1", NO, NO, "1") \
    D(mig_mode, "0", "0", NO, "0") \
    D(mig_pending, "0", "0", NO, "0") \
    D(mig_max, "7", "7", "0", "7") \
    D(mig_devices, "0", "0", "0", "0") \
    D(mig_gi, "", "", "", "") \
    D(mig_uuid, "", "", "", "")

#define ECC_DEFAULTS(D, counter, zero) \
    D(ecc_##counter##_corrected, "", "", "", "") \
    D(ecc_##counter##_uncorrected, "", "", "", "") \
    ECC_LOCATIONS(D, counter##_corrected, zero) \
    ECC_LOCATIONS(D, counter##_uncorrected, zero)

/* Ampere and later name SRAM as a whole; Volta names each cache. */
#define ECC_LOCATIONS(D, kind, zero) \
    D(ecc_##kind##_l1, NO, NO, zero, NO) \
    D(ecc_##kind##_l2, NO, NO, zero, NO) \
    D(ecc_##kind##_dram, zero, zero, zero, zero) \
    D(ecc_##kind##_register, NO, NO, zero, NO) \
    D(ecc_##kind##_texture, NO, NO, zero, NO) \
    D(ecc_##kind##_shm, NO, NO, zero, NO) \
    D(ecc_##kind##_cbu, NO, NO, zero, NO) \
    D(ecc_##kind##_sram, zero, zero, NO, zero)

/* NVLink 5 fields, one link each by scope. A bit error rate is (mantissa << 8 | exponent): 0x10f is 1e-15. */
#define NVLINK5(X, D) \
    X(D, 208, nvlink_rcv_errors, "0") \
    X(D, 215, nvlink_recovery_events, "0") \
    X(D, 220, nvlink_effective_ber, "0x10f") \
    X(D, 295, nvlink_plr_xmit_retry_blocks, "0")
#define AS_NVLINK5_DEFAULT(D, id, key, value) D(key, NO, NO, NO, value)

static const char *const PROFILES[] = {"h100", "a100", "v100", "b200", "gb200"};
enum { B200 = 3, PARTS, GB200 = PARTS };
struct default_value {
    const char *key, *parts[PARTS];
};
#define AS_DEFAULT(key, h100, a100, v100, b200) {#key, {h100, a100, v100, b200}},
static const struct default_value DEFAULT_VALUES[] = {DEFAULTS(AS_DEFAULT)};
/* Where a GB200 of an NVL72 differs from a B200. */
static const char *const GB200_VALUES[][2] = {
    {"name", "NVIDIA GB200"},
    {"pci_device_id", "0x294110de"},
    {"fabric_clique", "32766"},
    {"fabric_cluster_uuid", "6f1c2d9a5b3e4870a100c3d4e5f60718"},
};
static const char *const OTHER_KEYS[] = {
    "gpus", "order", "order_latched", "profile", "node", "uuid", "serial", "pci", "processes",
    "fabric_cluster_uuid", "no_driver", "trace", "calls", "nvml_version", "arbitrary", "device_count",
};

/* ---------------------------------------------------------------- scenario and state (all under `lock`) */

enum kind { DELAY, CRASH, DSTATE, HANG, FAIL, KINDS };
static const char *const KIND_NAMES[KINDS] = {"delay", "crash", "dstate", "hang", "fail"};

struct entry {
    char *key, *value;
    enum kind kind; /* KINDS: a value, not a fault */
    int gpu;        /* of a fault: -1 for all */
    const char *pattern; /* of a fault: within key, "" for every function */
};

struct device {
    int gpu, mig; /* mig -1: the whole GPU */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry entries[MAX_ENTRIES];
static size_t entry_count;
static char *scenario_path;
static struct stat scenario_stat;
static bool scenario_present;
static bool names_gpus, names_members; /* whether the scenario has values of single GPUs, links, MIG devices */
static int users;
static char library_version[NAME];
static int latched[MAX_GPUS], latched_count;
static struct device devices[MAX_GPUS][1 + MAX_MIGS];
static struct { double last, sum; ull base; bool started; } meters[MAX_GPUS];

static char *trim(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1]))
        end--;
    *end = '\0';
    return text;
}

/* "gpu12.rest" -> 12 and rest; anything else -> -1 and the text itself. */
static int split_gpu(const char *key, const char **rest)
{
    int gpu, length = 0;
    *rest = key;
    if (sscanf(key, "gpu%2d.%n", &gpu, &length) != 1 || length == 0 || gpu < 0)
        return -1;
    *rest = key + length;
    return gpu;
}

/* The fault that a key without its GPU names, and the function's pattern behind it. */
static enum kind fault_kind(const char *key, const char **pattern)
{
    for (int kind = 0; kind < KINDS; kind++) {
        size_t length = strlen(KIND_NAMES[kind]);
        if (strncmp(key, KIND_NAMES[kind], length) == 0 && (key[length] == '\0' || key[length] == '.')) {
            *pattern = key + length + (key[length] == '.');
            return (enum kind)kind;
        }
    }
    return KINDS;
}

/* Whether a key may be about one member of a family, such as nvlink3_state. */
static bool of_member(const char *key)
{
    for (; *key; key++)
        if (isdigit((unsigned char)key[0]) && key[1] == '_')
            return true;
    return false;
}

static void parse(FILE *file)
{
    char *line = NULL;
    size_t size = 0;
    names_gpus = names_members = false;
    while (entry_count) {
        entry_count--;
        free(entries[entry_count].key);
        free(entries[entry_count].value);
    }
    while (getline(&line, &size, file) >= 0 && entry_count < MAX_ENTRIES) {
        char *comment = strchr(line, '#');
        if (comment)
            *comment = '\0';
        char *equals = strchr(line, '=');
        if (!equals)
            continue;
        *equals = '\0';
        struct entry *entry = &entries[entry_count++];
        entry->key = strdup(trim(line));
        entry->value = strdup(trim(equals + 1));
        if (!entry->key || !entry->value)
            abort();
        const char *rest;
        entry->gpu = split_gpu(entry->key, &rest);
        entry->kind = fault_kind(rest, &entry->pattern);
        names_gpus |= entry->kind == KINDS && entry->gpu >= 0;
        names_members |= entry->kind == KINDS && of_member(rest);
    }
    free(line);
}

/* Read the scenario again if another file is there now. */
static void refresh_from(const char *path)
{
    struct stat now;
    scenario_present = path && stat(path, &now) == 0;
    if (!scenario_present)
        return;
    if (scenario_path && strcmp(path, scenario_path) == 0 && now.st_ino == scenario_stat.st_ino &&
        now.st_dev == scenario_stat.st_dev && now.st_size == scenario_stat.st_size &&
        now.st_mtim.tv_sec == scenario_stat.st_mtim.tv_sec && now.st_mtim.tv_nsec == scenario_stat.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "re");
    if (!file) {
        scenario_present = false;
        return;
    }
    if (fstat(fileno(file), &now) == 0)
        scenario_stat = now;
    parse(file);
    fclose(file);
    if (!scenario_path || strcmp(path, scenario_path) != 0) {
        free(scenario_path);
        scenario_path = strdup(path);
    }
}

static void refresh(void)
{
    refresh_from(getenv("NVML_SIM_SCENARIO"));
}

static const char *find(const char *key)
{
    for (size_t i = entry_count; i-- > 0;)
        if (entries[i].kind == KINDS && strcmp(entries[i].key, key) == 0)
            return entries[i].value;
    return NULL;
}

/* Names are only built if the scenario may have them: that took more CPU than all that a client does with the value. */
static const char *find_for(int gpu, const char *key)
{
    char full[3 * NAME];
    if (gpu < 0 || !names_gpus)
        return NULL;
    snprintf(full, sizeof full, "gpu%d.%s", gpu, key);
    return find(full);
}

static int part_of(int gpu)
{
    const char *name = find_for(gpu, "profile");
    if (!name)
        name = find("profile");
    for (size_t i = 0; name && i < COUNT(PROFILES); i++)
        if (strcmp(name, PROFILES[i]) == 0)
            return (int)i;
    return 0;
}

static size_t slot_of(const char *key)
{
    size_t hash = 14695981039346656037u; /* FNV-1a */
    for (; *key; key++)
        hash = (hash ^ (unsigned char)*key) * 1099511628211u;
    return hash % SLOTS;
}

/* By hash: compared one after the other, keys took more CPU than all that a client does with their values. */
static const struct default_value *default_value_of(const char *key)
{
    static const struct default_value *table[SLOTS];
    static size_t filled;
    size_t slot;
    for (; filled < COUNT(DEFAULT_VALUES); filled++) {
        for (slot = slot_of(DEFAULT_VALUES[filled].key); table[slot]; slot = (slot + 1) % SLOTS)
            continue;
        table[slot] = &DEFAULT_VALUES[filled];
    }
    for (slot = slot_of(key); table[slot]; slot = (slot + 1) % SLOTS)
        if (strcmp(table[slot]->key, key) == 0)
            return table[slot];
    return NULL;
}

static const char *default_of(int gpu, const char *key)
{
    int part = part_of(gpu);
    for (size_t i = 0; part == GB200 && i < COUNT(GB200_VALUES); i++)
        if (strcmp(GB200_VALUES[i][0], key) == 0)
            return GB200_VALUES[i][1];
    const struct default_value *value = default_value_of(key);
    return value ? value->parts[part == GB200 ? B200 : part] : NULL;
}

/* What the scenario or the part says: NULL or "" where it is to be worked out. */
static const char *lookup(int gpu, const char *key)
{
    const char *value = find_for(gpu, key);
    if (!value)
        value = find(key);
    return value ? value : default_of(gpu, key);
}

/* The same for member `index` of `family` (a link, a MIG device): familyI_key, then family_key; the GPU's own first. */
static const char *lookup_member(int gpu, const char *family, int index, const char *key)
{
    char one[2 * NAME + 16], all[NAME];
    const char *value = NULL;
    if (strlen(family) + 1 + strlen(key) >= sizeof all)
        abort();
    stpcpy(stpcpy(stpcpy(all, family), "_"), key);
    if (names_members) {
        snprintf(one, sizeof one, "%s%d_%s", family, index, key);
        value = find_for(gpu, one);
        if (!value)
            value = find_for(gpu, all);
        if (!value)
            value = find(one);
    }
    return value ? value : lookup(gpu, all);
}

static int as_int(const char *text, int otherwise)
{
    return text && *text ? (int)strtol(text, NULL, 0) : otherwise;
}

static double uptime(int gpu)
{
    struct timespec now;
    const char *frozen = lookup(gpu, "frozen");
    double stopped = frozen ? strtod(frozen, NULL) : 0;
    if (stopped > 0)
        return stopped;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static ull mix(ull x);

/* Whether the scenario wants arbitrary numbers, and the next one. */
static bool arbitrary(ull *out)
{
    static ull given;
    const char *how = find("arbitrary");
    if (!how)
        return false;
    given++;
    *out = strcmp(how, "random") == 0 ? mix(given ^ (ull)getpid() << 32) : 5000000 + given;
    return true;
}

/* The same for a count of which the scenario says nothing. */
static bool arbitrary_count(int gpu, const char *key, ull *out)
{
    static const char *const counts[] = {"nvlink_count", "mig_max", "processes", "device_count"};
    for (size_t i = 0; i < COUNT(counts); i++)
        if (strcmp(counts[i], key) == 0)
            return !find_for(gpu, key) && !find(key) && arbitrary(out);
    return false;
}

/* A value's text, in any of the forms above, as NVML's return code and 64 bits. */
static int number(int gpu, const char *text, ull *out)
{
    if (!text || !*text || strcmp(text, NO) == 0)
        return NOT_SUPPORTED;
    if (STARTS(text, "error:"))
        return as_int(text + 6, UNKNOWN);
    if (strcmp(text, "na") == 0 || strcmp(text, "nan") == 0) {
        *out = UINT64_MAX;
        return OK;
    }
    char *end;
    *out = strtoull(text, &end, STARTS(text, "0x") ? 16 : 10);
    if (*end == '+')
        *out += strtoull(end + 1, &end, 10) * (ull)(gpu < 0 ? 0 : gpu);
    if (*end == '~')
        *out += (ull)(strtod(end + 1, &end) * uptime(gpu));
    return OK;
}

/* ---------------------------------------------------------------- identity */

static ull mix(ull x)
{
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

static int order_of(int *order)
{
    const char *text = find("order");
    int count = 0, gpus = as_int(find("gpus"), 8);
    if (gpus > MAX_GPUS)
        gpus = MAX_GPUS;
    for (const char *at = text; at && *at && count < MAX_GPUS;) {
        char *end;
        long gpu = strtol(at, &end, 10);
        if (end == at)
            break;
        if (gpu >= 0 && gpu < gpus)
            order[count++] = (int)gpu;
        at = end + strspn(end, ", ");
    }
    for (int gpu = 0; !text && gpu < gpus; gpu++)
        order[count++] = gpu;
    return count;
}

static int visible(int *order)
{
    if (!as_int(find("order_latched"), 0))
        return order_of(order);
    memcpy(order, latched, sizeof latched);
    return latched_count;
}

static int index_of(int gpu)
{
    int order[MAX_GPUS], count = visible(order);
    for (int i = 0; i < count; i++)
        if (order[i] == gpu)
            return i;
    return -1;
}

struct address {
    uint domain, bus, slot;
};

static struct address address_of(int gpu)
{
    static const uint buses[MAX_GPUS] = {0x18, 0x2a, 0x3a, 0x5d, 0x9a, 0xab, 0xba, 0xdb,
                                         0x1b, 0x2d, 0x3d, 0x60, 0x9d, 0xae, 0xbd, 0xde};
    struct address address = {0, gpu < 0 ? 0 : buses[gpu], 0};
    const char *text = lookup(gpu, "pci");
    if (text)
        sscanf(text, "%x:%x:%x", &address.domain, &address.bus, &address.slot);
    return address;
}

/* A key's text, worked out where neither scenario nor part gives one. NULL: no such thing. */
static const char *text_of(int gpu, const char *key, char *buffer, size_t size)
{
    const char *text = lookup(gpu, key);
    if (text && *text)
        return text;
    ull seed = mix((ull)as_int(find("node"), 0) * MAX_GPUS + (ull)(gpu + 1));
    if (strcmp(key, "uuid") == 0) {
        ull more = mix(seed);
        snprintf(buffer, size, "GPU-%08x-%04x-%04x-%04x-%012llx", (uint)(seed >> 32), (uint)(seed >> 16) & 0xffff,
                 (uint)(seed & 0x0fff) | 0x4000, (uint)(more >> 48 & 0x3fff) | 0x8000, more & 0xffffffffffffULL);
    } else if (strcmp(key, "serial") == 0) {
        snprintf(buffer, size, "16%011llu", seed % 100000000000ULL);
    } else if (strcmp(key, "pci") == 0) {
        struct address address = address_of(gpu);
        snprintf(buffer, size, "%08X:%02X:%02X.0", address.domain, address.bus, address.slot);
    } else if (strcmp(key, "numa_node") == 0) {
        snprintf(buffer, size, "%d", gpu >= as_int(find("gpus"), 8) / 2);
    } else if (strcmp(key, "profile") == 0) {
        return PROFILES[part_of(gpu)];
    } else if (strcmp(key, "gpus") == 0) {
        return "8";
    } else if (strcmp(key, "gsp_version") == 0) {
        return lookup(-1, "driver_version");
    } else if (strcmp(key, "library_version") == 0) {
        return library_version;
    } else if (strcmp(key, "nvml_version") == 0) {
        int driver = atoi(library_version);
        snprintf(buffer, size, "%d.%.80s", driver >= 580 ? 13 : 12, library_version);
    } else {
        return NULL;
    }
    return buffer;
}

/* ---------------------------------------------------------------- values worked out from others */

static int value_of(const struct device *device, const char *key, ull *out);

static int energy_of(int gpu, ull *out)
{
    ull base, power;
    int rc = number(gpu, lookup(gpu, "energy"), &base);
    if (rc != OK || base == UINT64_MAX) {
        *out = base;
        return rc;
    }
    double now = uptime(gpu);
    if (number(gpu, lookup(gpu, "power_usage"), &power) != OK || power == UINT64_MAX)
        power = 0;
    if (!meters[gpu].started || meters[gpu].base != base) {
        meters[gpu].sum = (double)power * now;
        meters[gpu].base = base;
        meters[gpu].started = true;
        meters[gpu].last = now;
    } else if (now > meters[gpu].last) {
        meters[gpu].sum += (double)power * (now - meters[gpu].last);
        meters[gpu].last = now;
    }
    *out = base + (ull)meters[gpu].sum;
    return OK;
}

static const char *const LOCATIONS[] = {"l1", "l2", "dram", "register", "texture", "shm", "cbu", "sram"};
static const char *const ERROR_TYPES[] = {"corrected", "uncorrected"};
static const char *const COUNTERS[] = {"volatile", "aggregate"};

static int ecc_sum(const struct device *device, const char *total, ull *out)
{
    char key[NAME];
    ull one;
    int found = NOT_SUPPORTED;
    *out = 0;
    for (size_t i = 0; i < COUNT(LOCATIONS); i++) {
        snprintf(key, sizeof key, "%s_%s", total, LOCATIONS[i]);
        if (value_of(device, key, &one) != OK)
            continue;
        found = OK;
        *out = one == UINT64_MAX || *out == UINT64_MAX ? UINT64_MAX : *out + one;
    }
    return found;
}

static int margin(const struct device *device, ull *out)
{
    ull temperature;
    int rc = value_of(device, "temperature", &temperature);
    if (rc == OK)
        rc = value_of(device, "threshold_gpu_max", out);
    *out = *out == UINT64_MAX || temperature == UINT64_MAX ? UINT64_MAX : *out - temperature;
    return rc;
}

static int derived(const struct device *device, const char *key, ull *out)
{
    char buffer[NAME];
    if (strcmp(key, "margin_temperature") == 0)
        return margin(device, out);
    if (STARTS(key, "ecc_"))
        return ecc_sum(device, key, out);
    return number(device->gpu, text_of(device->gpu, key, buffer, sizeof buffer), out);
}

/* The number for `key`, of the MIG device where the handle is one's. */
static int value_of(const struct device *device, const char *key, ull *out)
{
    const char *text = device->mig < 0 ? lookup(device->gpu, key)
                                       : lookup_member(device->gpu, "mig", device->mig, key);
    if (STARTS(key, "ecc_volatile") || STARTS(key, "ecc_aggregate"))
        if (as_int(lookup(device->gpu, "ecc_mode"), 0) != 1)
            return NOT_SUPPORTED;
    if (arbitrary_count(device->gpu, key, out))
        return OK;
    if (text && *text)
        return number(device->gpu, text, out);
    if (device->mig >= 0 && strcmp(key, "gi") == 0) {
        *out = (ull)device->mig + 1;
        return OK;
    }
    return derived(device, key, out);
}

static int get_uint(const struct device *device, const char *key, uint *out)
{
    ull value;
    int rc = value_of(device, key, &value);
    if (rc == OK)
        *out = (uint)value;
    return rc;
}

static int get_ull(const struct device *device, const char *key, ull *out)
{
    ull value;
    int rc = strcmp(key, "energy") == 0 ? energy_of(device->gpu, &value) : value_of(device, key, &value);
    if (rc == OK)
        *out = value;
    return rc;
}

static int put_text(const char *text, char *out, uint size)
{
    if (!text || strcmp(text, NO) == 0)
        return NOT_SUPPORTED;
    if (STARTS(text, "error:"))
        return as_int(text + 6, UNKNOWN);
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}

static int member_number(const struct device *device, const char *family, const char *count, uint link,
                         const char *key, ull *out)
{
    ull links;
    int rc = value_of(device, count, &links);
    if (rc != OK || links == 0)
        return NOT_SUPPORTED;
    if (link >= links || link >= MAX_LINKS)
        return INVALID_ARGUMENT;
    return number(device->gpu, lookup_member(device->gpu, family, (int)link, key), out);
}

static int link_number(const struct device *device, uint link, const char *key, ull *out)
{
    return member_number(device, "nvlink", "nvlink_count", link, key, out);
}

static int link_sum(const struct device *device, const char *key, ull *out)
{
    ull one;
    int rc = link_number(device, 0, key, out), next;
    for (uint link = 1; rc == OK && (next = link_number(device, link, key, &one)) != INVALID_ARGUMENT; link++)
        if (next == OK)
            *out += one;
    return rc;
}

/* ---------------------------------------------------------------- faults */

struct verdict {
    char *values[KINDS]; /* copies: the scenario may be read again while the call waits */
};

static bool matches(const char *pattern, const char *function)
{
    char base[NAME];
    snprintf(base, sizeof base, "%s", function);
    char *version = strrchr(base, '_');
    if (version && version[1] == 'v')
        *version = '\0';
    if (strcmp(pattern, "init") == 0)
        return STARTS(function, "nvmlInit");
    return fnmatch(pattern, function, 0) == 0 || fnmatch(pattern, base, 0) == 0;
}

/* The value of the most specific fault of a kind, or NULL. */
static const char *fault_of(enum kind kind, const char *function, int gpu)
{
    const char *best = NULL;
    int rank = -1;
    for (size_t i = 0; i < entry_count; i++) {
        const struct entry *entry = &entries[i];
        if (entry->kind != kind || (entry->gpu >= 0 && entry->gpu != gpu))
            continue;
        if (*entry->pattern && !matches(entry->pattern, function))
            continue;
        int own = (entry->gpu >= 0 ? 2 : 0) + (*entry->pattern ? 1 : 0);
        if (own >= rank) {
            rank = own;
            best = entry->value;
        }
    }
    return best && strcmp(best, "0") != 0 && *best ? best : NULL;
}

static void append(const char *path, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(const char *path, const char *format, ...)
{
    if (!path || !*path)
        return;
    char line[2 * NAME];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd >= 0 && length > 0 && write(fd, line, (size_t)length) < 0)
        perror(path);
    if (fd >= 0)
        close(fd);
}

static void write_through(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        return;
    if (write(fd, "x", 1) != 1 || fsync(fd) != 0)
        perror(path);
    close(fd);
}

static void wait_seconds(const char *text)
{
    double seconds = strtod(text, NULL);
    struct timespec left = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
}

/* Begin a call: take the lock, meet the faults. Returns with the lock held; leave() ends the call. */
static int enter(const char *function, int gpu)
{
    char *faults[KINDS] = {NULL};
    bool waits = false;
    pthread_mutex_lock(&lock);
    refresh();
    append(find("calls"), "%s\n", function);
    for (int kind = 0; kind < FAIL; kind++) {
        const char *value = fault_of((enum kind)kind, function, gpu);
        faults[kind] = value ? strdup(value) : NULL;
        waits |= value != NULL;
    }
    if (waits) {
        pthread_mutex_unlock(&lock);
        if (faults[DELAY])
            wait_seconds(faults[DELAY]);
        if (faults[CRASH])
            raise(SIGSEGV);
        if (faults[DSTATE])
            write_through(faults[DSTATE]);
        while (faults[HANG])
            pause();
        for (int kind = 0; kind < KINDS; kind++)
            free(faults[kind]);
        pthread_mutex_lock(&lock);
        refresh();
    }
    const char *fail = fault_of(FAIL, function, gpu);
    if (fail)
        return as_int(fail, UNKNOWN);
    bool gone = as_int(find("no_driver"), 0) && strcmp(function, "nvmlShutdown") != 0;
    return gone ? DRIVER_NOT_LOADED : OK;
}

static int leave(int rc)
{
    pthread_mutex_unlock(&lock);
    return rc;
}

static int enter_initialized(const char *function, int gpu)
{
    int rc = enter(function, gpu);
    return users == 0 ? UNINITIALIZED : rc;
}

/* A MIG device has only these; the rest belongs to the GPU it is on. */
static bool mig_has(const char *function)
{
    static const char *const names[] = {
        "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGet*RunningProcesses*", "nvmlDeviceGetGpuInstanceId",
    };
    for (size_t i = 0; i < COUNT(names); i++)
        if (fnmatch(names[i], function, 0) == 0)
            return true;
    return false;
}

/* Begin a call about a device. */
static int enter_device(const char *function, const struct device *device)
{
    const struct device *first = &devices[0][0], *last = &devices[MAX_GPUS - 1][MAX_MIGS];
    bool ours = device >= first && device <= last;
    int rc = enter_initialized(function, ours ? device->gpu : -1);
    if (rc != OK)
        return rc;
    if (!ours)
        return INVALID_ARGUMENT;
    if (index_of(device->gpu) < 0)
        return GPU_IS_LOST;
    return device->mig >= 0 && !mig_has(function) ? NOT_SUPPORTED : OK;
}

/* ---------------------------------------------------------------- library and system */

static int initialize(const char *function)
{
    int rc = enter(function, -1);
    if (rc == OK && !scenario_present)
        rc = DRIVER_NOT_LOADED;
    if (rc == OK) {
        const char *driver = lookup(-1, "driver_version"), *own = lookup(-1, "library_version");
        if (!*library_version)
            snprintf(library_version, sizeof library_version, "%s", own && *own ? own : driver);
        if (strcmp(library_version, driver) != 0)
            rc = VERSION_MISMATCH;
    }
    if (rc == OK && users++ == 0) {
        latched_count = order_of(latched);
        for (int gpu = 0; gpu < MAX_GPUS; gpu++)
            for (int mig = 0; mig <= MAX_MIGS; mig++)
                devices[gpu][mig] = (struct device){gpu, mig - 1};
    }
    if (rc == OK)
        append(find("trace"), "init %d %d\n", (int)getpid(), users);
    return leave(rc);
}

API int nvmlInitWithFlags(uint flags)
{
    (void)flags;
    return initialize(__func__);
}

API int nvmlShutdown(void)
{
    int rc = enter_initialized(__func__, -1);
    if (rc == OK) {
        users--;
        append(find("trace"), "shutdown %d %d\n", (int)getpid(), users);
    }
    return leave(rc);
}

API const char *nvmlErrorString(int code)
{
#define AS_TEXT(name, number, text) \
    case number: \
        return text;
    switch (code) {
        RETURNS(AS_TEXT)
    default:
        return "Unknown Error";
    }
}

#define SYSTEM_TEXTS(X) \
    X(nvmlSystemGetDriverVersion, "driver_version") \
    X(nvmlSystemGetNVMLVersion, "nvml_version")
#define AS_SYSTEM_TEXT(function, key) \
    API int function(char *out, uint size) \
    { \
        char buffer[NAME]; \
        int rc = enter_initialized(__func__, -1); \
        return leave(rc == OK ? put_text(text_of(-1, key, buffer, sizeof buffer), out, size) : rc); \
    }
SYSTEM_TEXTS(AS_SYSTEM_TEXT)

API int nvmlSystemGetCudaDriverVersion(int *out)
{
    int rc = enter_initialized(__func__, -1);
    if (rc == OK)
        *out = as_int(lookup(-1, "cuda_version"), 0);
    return leave(rc);
}

/* ---------------------------------------------------------------- finding devices */

static uint given_count(int *order)
{
    ull count;
    const char *text = find("device_count");
    if (text)
        return (uint)strtoul(text, NULL, 0);
    return arbitrary_count(-1, "device_count", &count) ? (uint)count : (uint)visible(order);
}

API int nvmlDeviceGetCount_v2(uint *out)
{
    int order[MAX_GPUS], rc = enter_initialized(__func__, -1);
    if (rc == OK)
        *out = given_count(order);
    return leave(rc);
}

/* A look-up meets first the faults of the library, then those of the GPU it finds; the call is counted once. */
static int handle_for(const char *function, int gpu, int absent, struct device **out)
{
    int rc = enter_initialized(function, gpu);
    if (rc == OK && gpu < 0)
        rc = absent;
    if (rc == OK)
        *out = &devices[gpu][0];
    return leave(rc);
}

static int gpu_at(uint index)
{
    int order[MAX_GPUS];
    pthread_mutex_lock(&lock);
    refresh();
    int count = visible(order), gpu = index < (uint)count ? order[index] : -1;
    pthread_mutex_unlock(&lock);
    return gpu;
}

API int nvmlDeviceGetHandleByIndex_v2(uint index, struct device **out)
{
    return handle_for(__func__, gpu_at(index), INVALID_ARGUMENT, out);
}

/* ---------------------------------------------------------------- plain getters, by table */

#define TEXTS(X) \
    X(nvmlDeviceGetSerial, "serial") \
    X(nvmlDeviceGetVbiosVersion, "vbios_version")

#define UINTS(X) \
    X(nvmlDeviceGetPowerUsage, "power_usage") \
    X(nvmlDeviceGetPowerManagementDefaultLimit, "power_limit_default") \
    X(nvmlDeviceGetEnforcedPowerLimit, "power_limit_enforced") \
    X(nvmlDeviceGetPerformanceState, "performance_state") \
    X(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation") \
    X(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width") \
    X(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation_max") \
    X(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max") \
    X(nvmlDeviceGetPcieReplayCounter, "pcie_replay") \
    X(nvmlDeviceGetPersistenceMode, "persistence_mode") \
    X(nvmlDeviceGetComputeMode, "compute_mode") \
    X(nvmlDeviceGetVirtualizationMode, "virtualization_mode") \
    X(nvmlDeviceGetMaxMigDeviceCount, "mig_max") \
    X(nvmlDeviceGetInforomConfigurationChecksum, "inforom_checksum")

#define ULLS(X) \
    X(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle_reasons") \
    X(nvmlDeviceGetCurrentClocksEventReasons, "throttle_reasons") \
    X(nvmlDeviceGetSupportedClocksThrottleReasons, "throttle_supported") \
    X(nvmlDeviceGetSupportedClocksEventReasons, "throttle_supported") \
    X(nvmlDeviceGetTotalEnergyConsumption, "energy")

#define PAIRS(X) \
    X(nvmlDeviceGetEccMode, "ecc_mode", "ecc_pending") \
    X(nvmlDeviceGetMigMode, "mig_mode", "mig_pending") \
    X(nvmlDeviceGetPowerManagementLimitConstraints, "power_limit_min", "power_limit_max")

/* One argument picks the key. */
static const char *const CLOCKS[] = {"clock_sm", "clock_sm", "clock_memory"};
static const char *const MAX_CLOCKS[] = {"clock_max_sm", "clock_max_sm", "clock_max_memory"};
static const char *const SENSORS[] = {"temperature"};
static const char *const THRESHOLDS[] = {
    "threshold_shutdown", "threshold_slowdown", "threshold_memory_max", "threshold_gpu_max"};
static const char *const PCIE_COUNTERS[] = {"pcie_tx", "pcie_rx"};

#define PICKED(X) \
    X(nvmlDeviceGetTemperature, SENSORS) \
    X(nvmlDeviceGetTemperatureThreshold, THRESHOLDS) \
    X(nvmlDeviceGetClockInfo, CLOCKS) \
    X(nvmlDeviceGetMaxClockInfo, MAX_CLOCKS) \
    X(nvmlDeviceGetPcieThroughput, PCIE_COUNTERS)

#define AS_TEXT_GETTER(function, key) \
    API int function(const struct device *device, char *out, uint size) \
    { \
        char buffer[NAME]; \
        int rc = enter_device(__func__, device); \
        return leave(rc == OK ? put_text(text_of(device->gpu, key, buffer, sizeof buffer), out, size) : rc); \
    }
#define AS_UINT_GETTER(function, key) \
    API int function(const struct device *device, uint *out) \
    { \
        int rc = enter_device(__func__, device); \
        return leave(rc == OK ? get_uint(device, key, out) : rc); \
    }
#define AS_ULL_GETTER(function, key) \
    API int function(const struct device *device, ull *out) \
    { \
        int rc = enter_device(__func__, device); \
        return leave(rc == OK ? get_ull(device, key, out) : rc); \
    }
#define AS_PAIR_GETTER(function, first_key, second_key) \
    API int function(const struct device *device, uint *first, uint *second) \
    { \
        int rc = enter_device(__func__, device); \
        if (rc == OK) \
            rc = get_uint(device, first_key, first); \
        return leave(rc == OK ? get_uint(device, second_key, second) : rc); \
    }
#define AS_PICKED_GETTER(function, keys) \
    API int function(const struct device *device, uint which, uint *out) \
    { \
        int rc = enter_device(__func__, device); \
        if (rc == OK && which >= COUNT(keys)) \
            rc = INVALID_ARGUMENT; \
        return leave(rc == OK ? get_uint(device, keys[which], out) : rc); \
    }
TEXTS(AS_TEXT_GETTER)
UINTS(AS_UINT_GETTER)
ULLS(AS_ULL_GETTER)
PAIRS(AS_PAIR_GETTER)
PICKED(AS_PICKED_GETTER)

API int nvmlDeviceGetName(const struct device *device, char *out, uint size)
{
    char name[NAME];
    int rc = enter_device(__func__, device);
    if (rc != OK)
        return leave(rc);
    const char *whole = lookup(device->gpu, "name");
    snprintf(name, sizeof name, "%.64s%s", whole, device->mig < 0 ? "" : " MIG 1g.10gb");
    return leave(put_text(device->mig < 0 ? whole : name, out, size));
}

API int nvmlDeviceGetUUID(const struct device *device, char *out, uint size)
{
    char buffer[NAME], mig[NAME];
    int rc = enter_device(__func__, device);
    if (rc != OK)
        return leave(rc);
    const char *uuid = text_of(device->gpu, "uuid", buffer, sizeof buffer);
    if (device->mig >= 0) {
        const char *own = lookup_member(device->gpu, "mig", device->mig, "uuid");
        snprintf(mig, sizeof mig, "MIG-%08x%.60s", (uint)mix((ull)device->mig), strlen(uuid) > 12 ? uuid + 12 : "");
        uuid = own && *own ? own : mig;
    }
    return leave(put_text(uuid, out, size));
}

API int nvmlDeviceGetGspFirmwareVersion(const struct device *device, char *out)
{
    char buffer[NAME];
    int rc = enter_device(__func__, device);
    return leave(rc == OK ? put_text(text_of(device->gpu, "gsp_version", buffer, sizeof buffer), out, 64) : rc);
}

struct utilization {
    uint gpu, memory;
};

API int nvmlDeviceGetUtilizationRates(const struct device *device, struct utilization *out)
{
    int rc = enter_device(__func__, device);
    if (rc == OK && as_int(lookup(device->gpu, "mig_mode"), 0) == 1)
        rc = NOT_SUPPORTED;
    if (rc == OK)
        rc = get_uint(device, "utilization_gpu", &out->gpu);
    return leave(rc == OK ? get_uint(device, "utilization_memory", &out->memory) : rc);
}

/* ---------------------------------------------------------------- structures */

struct pci_info {
    char legacy[16];
    uint domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

API int nvmlDeviceGetPciInfo_v3(const struct device *device, struct pci_info *out)
{
    int rc = enter_device(__func__, device);
    if (rc == OK) {
        struct address address = address_of(device->gpu);
        *out = (struct pci_info){.domain = address.domain, .bus = address.bus, .device = address.slot};
    }
    return leave(rc);
}

/* A structure that starts with its version: the words that nvidia-ml-py sends. */
enum version {
    TEMPERATURE_V1 = 0x100000c,
    MARGIN_V1 = 0x1000008,
    MEMORY_V2 = 0x2000028,
    SRAM_V1 = 0x1000068,
    REPAIR_V1 = 0x100000c,
    UNREPAIRABLE_V1 = 0x1000008,
    FABRIC_V2 = 0x2000024,
    FABRIC_V3 = 0x3000028,
};

static int check_version(uint version, uint wanted)
{
    return version == wanted ? OK : ARGUMENT_VERSION_MISMATCH;
}

struct temperature {
    uint version, sensor, celsius;
};
struct margin {
    uint version, celsius;
};
struct repair {
    uint version, channel, tpc;
};
struct unrepairable {
    uint version, flag;
};

API int nvmlDeviceGetTemperatureV(const struct device *device, struct temperature *io)
{
    int rc = enter_device(__func__, device);
    if (rc == OK)
        rc = check_version(io->version, TEMPERATURE_V1);
    if (rc == OK && io->sensor >= COUNT(SENSORS))
        rc = INVALID_ARGUMENT;
    return leave(rc == OK ? get_uint(device, SENSORS[io->sensor], &io->celsius) : rc);
}

API int nvmlDeviceGetMarginTemperature(const struct device *device, struct margin *io)
{
    int rc = enter_device(__func__, device);
    if (rc == OK)
        rc = check_version(io->version, MARGIN_V1);
    return leave(rc == OK ? get_uint(device, "margin_temperature", &io->celsius) : rc);
}

API int nvmlDeviceGetRepairStatus(const struct device *device, struct repair *io)
{
    int rc = enter_device(__func__, device);
    if (rc == OK)
        rc = check_version(io->version, REPAIR_V1);
    if (rc == OK)
        rc = get_uint(device, "repair_channel_pending", &io->channel);
    return leave(rc == OK ? get_uint(device, "repair_tpc_pending", &io->tpc) : rc);
}

API int nvmlDeviceGetUnrepairableMemoryFlag_v1(const struct device *device, struct unrepairable *io)
{
    int rc = enter_device(__func__, device);
    if (rc == OK)
        rc = check_version(io->version, UNREPAIRABLE_V1);
    return leave(rc == OK ? get_uint(device, "unrepairable_memory", &io->flag) : rc);
}

struct memory {
    ull total, free, used;
};
struct memory_v2 {
    uint version;
    ull total, reserved, free, used;
};

static int fill_memory(const struct device *device, struct memory_v2 *out)
{
    int rc = get_ull(device, "memory_total", &out->total);
    if (rc == OK)
        rc = get_ull(device, "memory_reserved", &out->reserved);
    if (rc == OK)
        rc = get_ull(device, "memory_used", &out->used);
    if (rc != OK)
        return rc;
    bool known = out->total != UINT64_MAX && out->reserved != UINT64_MAX && out->used != UINT64_MAX;
    out->free = known ? out->total - out->reserved - out->used : UINT64_MAX;
    return OK;
}

API int nvmlDeviceGetMemoryInfo(const struct device *device, struct memory *out)
{
    struct memory_v2 all = {0};
    int rc = enter_device(__func__, device);
    if (rc == OK)
        rc = fill_memory(device, &all);
    if (rc == OK) /* version 1 counts what is reserved as used */
        *out = (struct memory){all.total, all.free,
                               all.used == UINT64_MAX || all.reserved == UINT64_MAX ? UINT64_MAX
                                                                                    : all.used + all.reserved};
    return leave(rc);
}

API int nvmlDeviceGetMemoryInfo_v2(const struct device *device, struct memory_v2 *io)
{
    int rc = enter_device(__func__, device);
    if (rc == OK)
        rc = check_version(io->version, MEMORY_V2);
    return leave(rc == OK ? fill_memory(device, io) : rc);
}

/* ---------------------------------------------------------------- ECC, rows, pages */

static int ecc(const struct device *device, uint type, uint counter, const char *location, ull *out)
{
    char key[NAME];
    if (type >= COUNT(ERROR_TYPES) || counter >= COUNT(COUNTERS) || !location)
        return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "ecc_%s_%s%s%s", COUNTERS[counter], ERROR_TYPES[type], *location ? "_" : "", location);
    return get_ull(device, key, out);
}

API int nvmlDeviceGetMemoryErrorCounter(const struct device *device, uint type, uint counter, uint location, ull *out)
{
    int rc = enter_device(__func__, device);
    const char *name = location < COUNT(LOCATIONS) ? LOCATIONS[location] : NULL;
    return leave(rc == OK ? ecc(device, type, counter, name, out) : rc);
}

struct sram_status {
    uint version;
    ull counts[11];
    uint threshold_exceeded;
};

API int nvmlDeviceGetSramEccErrorStatus(const struct device *device, struct sram_status *io)
{
    static const char *const keys[] = {
        "sram_aggregate_unc_parity", "sram_aggregate_unc_secded", "sram_aggregate_cor",
        "sram_volatile_unc_parity", "sram_volatile_unc_secded", "sram_volatile_cor"};
    int rc = enter_device(__func__, device);
    if (rc == OK)
        rc = check_version(io->version, SRAM_V1);
    for (size_t i = 0; rc == OK && i < COUNT(keys); i++)
        rc = get_ull(device, keys[i], &io->counts[i]);
    return leave(rc == OK ? get_uint(device, "sram_threshold_exceeded", &io->threshold_exceeded) : rc);
}

/* ---------------------------------------------------------------- NVLink and fabric */

#define LINK_UINTS(X) \
    X(nvmlDeviceGetNvLinkState, "state") \
    X(nvmlDeviceGetNvLinkVersion, "version") \
    X(nvmlDeviceGetNvLinkRemoteDeviceType, "remote_type")
#define AS_LINK_GETTER(function, key) \
    API int function(const struct device *device, uint link, uint *out) \
    { \
        ull value; \
        int rc = enter_device(__func__, device); \
        if (rc == OK) \
            rc = link_number(device, link, key, &value); \
        if (rc == OK) \
            *out = (uint)value; \
        return leave(rc); \
    }
LINK_UINTS(AS_LINK_GETTER)

API int nvmlDeviceGetNvLinkErrorCounter(const struct device *device, uint link, uint counter, ull *out)
{
    static const char *const keys[] = {"replay", "recovery", "crc_flit"};
    int rc = enter_device(__func__, device);
    if (rc == OK && counter >= COUNT(keys))
        rc = INVALID_ARGUMENT;
    return leave(rc == OK ? link_number(device, link, keys[counter], out) : rc);
}

struct fabric {
    uint8_t cluster[16];
    uint status, clique, state;
};
struct fabric_v {
    uint version;
    struct fabric base;
    uint health_mask;
    uint8_t health_summary; /* version 3 */
};

static int fill_fabric(const struct device *device, struct fabric *out)
{
    const char *uuid = lookup(device->gpu, "fabric_cluster_uuid");
    int rc = get_uint(device, "fabric_state", &out->state);
    if (rc == OK)
        rc = get_uint(device, "fabric_status", &out->status);
    if (rc == OK)
        rc = get_uint(device, "fabric_clique", &out->clique);
    memset(out->cluster, 0, sizeof out->cluster);
    for (size_t i = 0; uuid && i < sizeof out->cluster && strlen(uuid) >= 2 * (i + 1); i++)
        sscanf(uuid + 2 * i, "%2hhx", &out->cluster[i]);
    return rc;
}

API int nvmlDeviceGetGpuFabricInfoV(const struct device *device, struct fabric_v *io)
{
    uint summary = 0;
    int rc = enter_device(__func__, device);
    if (rc == OK && io->version != FABRIC_V3)
        rc = check_version(io->version, FABRIC_V2);
    if (rc == OK)
        rc = fill_fabric(device, &io->base);
    if (rc == OK)
        rc = get_uint(device, "fabric_health_mask", &io->health_mask);
    if (rc == OK && io->version == FABRIC_V3) {
        rc = get_uint(device, "fabric_health_summary", &summary);
        io->health_summary = (uint8_t)summary;
    }
    return leave(rc);
}

/* ---------------------------------------------------------------- field values */

enum field_type { DOUBLE, UINT, ULONG, ULL, SLL, SINT };
struct field {
    uint id;
    enum field_type type;
    bool of_link; /* its scope names the link, or all of them */
    const char *key;
};
#define ONE(id, type, key) {id, type, false, key},
#define SCOPED(id, type, key) {id, type, true, key},
#define ECC_FIELDS(l1, counter) \
    ONE(l1, ULL, "ecc_" counter "_corrected_l1") ONE(l1 + 1, ULL, "ecc_" counter "_uncorrected_l1") \
    ONE(l1 + 2, ULL, "ecc_" counter "_corrected_l2") ONE(l1 + 3, ULL, "ecc_" counter "_uncorrected_l2") \
    ONE(l1 + 4, ULL, "ecc_" counter "_corrected_dram") ONE(l1 + 5, ULL, "ecc_" counter "_uncorrected_dram") \
    ONE(l1 + 6, ULL, "ecc_" counter "_corrected_register") ONE(l1 + 7, ULL, "ecc_" counter "_uncorrected_register") \
    ONE(l1 + 8, ULL, "ecc_" counter "_corrected_texture") ONE(l1 + 9, ULL, "ecc_" counter "_uncorrected_texture") \
    ONE(l1 + 10, ULL, "ecc_" counter "_uncorrected_cbu")
#define AS_NVLINK5_FIELD(unused, id, key, value) SCOPED(id, ULL, &#key[sizeof "nvlink_" - 1])

static const struct field FIELDS[] = {
    ONE(3, ULL, "ecc_volatile_corrected") ONE(4, ULL, "ecc_volatile_uncorrected")
    ONE(5, ULL, "ecc_aggregate_corrected") ONE(6, ULL, "ecc_aggregate_uncorrected")
    ECC_FIELDS(7, "volatile") ECC_FIELDS(18, "aggregate")
    ONE(29, UINT, "retired_sbe") ONE(30, UINT, "retired_dbe") ONE(31, UINT, "retired_pending")
    ONE(74, ULL, "violation_power") ONE(82, UINT, "memory_temperature")
    ONE(90, ULL, "nvlink_speed") ONE(91, UINT, "nvlink_count") ONE(94, UINT, "pcie_replay")
    SCOPED(138, ULL, "data_tx") SCOPED(139, ULL, "data_rx")
    ONE(142, UINT, "remapped_correctable") ONE(143, UINT, "remapped_uncorrectable")
    ONE(144, UINT, "remapped_pending") ONE(145, UINT, "remapped_failure")
    SCOPED(161, ULL, "replay") SCOPED(162, ULL, "recovery") SCOPED(163, ULL, "crc_flit") SCOPED(165, UINT, "state")
    ONE(173, UINT, "pcie_correctable") ONE(179, UINT, "pcie_non_fatal") ONE(180, UINT, "pcie_fatal")
    ONE(193, SINT, "tlimit_shutdown") ONE(194, SINT, "tlimit_slowdown") ONE(195, SINT, "tlimit_memory_max")
    ONE(196, SINT, "tlimit_gpu_max")
    ONE(197, ULL, "pcie_tx_bytes") ONE(198, ULL, "pcie_rx_bytes")
    NVLINK5(AS_NVLINK5_FIELD, )
    ONE(230, UINT, "recovery_action")
    ONE(269, ULL, "violation_sw_thermal") ONE(270, ULL, "violation_hw_thermal") ONE(271, ULL, "violation_power_brake")
    ONE(307, UINT, "repair_bank_pending")
};
enum { FIELD_LIMIT = 308 };

union value {
    double dVal;
    uint uiVal;
    ull ullVal;
    int siVal;
};
struct field_value {
    uint32_t id, scope;
    int64_t timestamp, latency;
    uint type;
    int rc;
    union value value;
};

static const struct field *field_by_id(uint id)
{
    for (size_t i = 0; i < COUNT(FIELDS); i++)
        if (id == FIELDS[i].id)
            return &FIELDS[i];
    return NULL;
}

static void answer_field(const struct device *device, struct field_value *io)
{
    char key[NAME];
    ull value = 0;
    snprintf(key, sizeof key, "field_fail.%u", io->id);
    io->rc = as_int(lookup(device->gpu, key), OK);
    if (io->rc != OK)
        return;
    const struct field *field = field_by_id(io->id);
    snprintf(key, sizeof key, "field.%u", io->id);
    const char *own = lookup(device->gpu, key);
    if (own && (strpbrk(own, ".") || strstr(own, "nan") || strstr(own, "inf"))) {
        io->type = DOUBLE;
        io->value.dVal = strtod(own, NULL);
        return;
    }
    if (own)
        io->rc = number(device->gpu, own, &value);
    else if (field && field->of_link)
        io->rc = io->scope == UINT32_MAX ? link_sum(device, field->key, &value)
                                         : link_number(device, io->scope, field->key, &value);
    else if (field)
        io->rc = get_ull(device, field->key, &value);
    else
        io->rc = io->id == 0 || io->id >= FIELD_LIMIT ? INVALID_ARGUMENT : NOT_SUPPORTED;
    io->type = field ? field->type : ULL;
    if ((io->rc == NOT_SUPPORTED || io->rc == INVALID_ARGUMENT) && !own && arbitrary(&value)) {
        io->rc = OK;
        io->type = (uint)(value % 8); /* 6 and 7 are no types that NVML has */
        io->value.ullVal = value;
        return;
    }
    if (io->rc != OK)
        return;
    io->value.ullVal = 0;
    if (io->type == ULL)
        io->value.ullVal = value;
    else
        io->value.uiVal = (uint)value;
}

API int nvmlDeviceGetFieldValues(const struct device *device, int count, struct field_value *values)
{
    struct timespec now;
    int rc = enter_device(__func__, device);
    if (rc == OK && count < 1)
        rc = INVALID_ARGUMENT;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; rc == OK && i < count; i++) {
        values[i].timestamp = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        values[i].latency = 1 + i;
        answer_field(device, &values[i]);
    }
    return leave(rc);
}

/* ---------------------------------------------------------------- MIG and processes */

API int nvmlDeviceGetMigDeviceHandleByIndex(const struct device *device, uint index, struct device **out)
{
    int rc = enter_device(__func__, device);
    if (rc == OK && index >= (uint)as_int(lookup(device->gpu, "mig_max"), 0))
        rc = INVALID_ARGUMENT;
    if (rc == OK && (as_int(lookup(device->gpu, "mig_mode"), 0) != 1 || index >= MAX_MIGS ||
                     index >= (uint)as_int(lookup(device->gpu, "mig_devices"), 0)))
        rc = NOT_FOUND;
    if (rc == OK)
        *out = &devices[device->gpu][1 + index];
    return leave(rc);
}

API int nvmlDeviceGetGpuInstanceId(const struct device *device, uint *out)
{
    int rc = enter_device(__func__, device);
    if (rc == OK && device->mig < 0)
        rc = NOT_SUPPORTED;
    return leave(rc == OK ? get_uint(device, "gi", out) : rc);
}

struct process {
    uint pid;
    ull memory;
    uint gpu_instance, compute_instance;
};

/* "PID:BYTES[:GI:CI], ..."; a MIG device has the processes of its own GPU instance. */
static int processes(const struct device *device, uint *count, struct process *out)
{
    const char *text = lookup(device->gpu, "processes");
    uint room = *count, found = 0, own = UINT32_MAX;
    if (text && strcmp(text, NO) == 0)
        return NOT_SUPPORTED;
    ull any;
    if (arbitrary_count(device->gpu, "processes", &any)) {
        *count = (uint)any;
        return any % 2 ? INSUFFICIENT_SIZE : OK;
    }
    if (device->mig >= 0)
        get_uint(device, "gi", &own);
    for (const char *at = text; at && *at;) {
        char memory[NAME] = "na";
        struct process one = {0, 0, UINT32_MAX, UINT32_MAX};
        int fields = sscanf(at, " %u : %95[0-9a-z] : %u : %u", &one.pid, memory, &one.gpu_instance,
                            &one.compute_instance);
        number(device->gpu, memory, &one.memory);
        if (fields >= 1 && (own == UINT32_MAX || one.gpu_instance == own)) {
            if (found < room)
                out[found] = one;
            found++;
        }
        at = strchr(at, ',');
        at = at ? at + 1 : NULL;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

#define AS_PROCESS_LIST(function) \
    API int function(const struct device *device, uint *count, struct process *out) \
    { \
        int rc = enter_device(__func__, device); \
        return leave(rc == OK ? processes(device, count, out) : rc); \
    }
AS_PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2)
AS_PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3)

/* ---------------------------------------------------------------- for the Python side: what the scenario means */

static bool is_key(const char *key)
{
    const char *pattern;
    if (fault_kind(key, &pattern) != KINDS || STARTS(key, "field.") || STARTS(key, "field_fail."))
        return true;
    for (size_t i = 0; i < COUNT(DEFAULT_VALUES); i++)
        if (strcmp(DEFAULT_VALUES[i].key, key) == 0)
            return true;
    for (size_t i = 0; i < COUNT(OTHER_KEYS); i++)
        if (strcmp(OTHER_KEYS[i], key) == 0)
            return true;
    return false;
}

/* Whether `key` (without "gpuN.") means anything: nvlink7_state counts as nvlink_state. */
API bool nvmlSimIsKey(const char *key)
{
    char all[NAME];
    int length = 0;
    uint index;
    if (is_key(key))
        return true;
    const char *family = STARTS(key, "nvlink") ? "nvlink" : STARTS(key, "mig") ? "mig" : "";
    if (!*family || sscanf(key + strlen(family), "%2u_%n", &index, &length) != 1 || length == 0)
        return false;
    snprintf(all, sizeof all, "%s_%s", family, key + strlen(family) + (size_t)length);
    return is_key(all);
}

/* The text of a key in a scenario file: a number as NVML would return it where it is one. False: there is none. */
API bool nvmlSimText(const char *path, int gpu, const char *key, char *out, uint size)
{
    char buffer[NAME];
    ull value;
    pthread_mutex_lock(&lock);
    refresh_from(path);
    const char *text = text_of(gpu, key, buffer, sizeof buffer);
    bool stepped = text && isdigit((unsigned char)*text) && strpbrk(text, "+~") &&
                   strspn(text, "0123456789+~.") == strlen(text);
    if (stepped && number(gpu, text, &value) == OK) {
        snprintf(buffer, sizeof buffer, "%llu", value);
        text = buffer;
    }
    bool found = text && put_text(text, out, size) == OK;
    pthread_mutex_unlock(&lock);
    return found;
}
