// Two compact hash tables for the directory, see tables.pyi.
//
// A dict spends about 150 bytes on one 16-byte key and three cache misses on one lookup; the
// directory holds millions and looks up a hundred at a time. Here an entry is 24 bytes in one
// flat array: open addressing with linear probing, and deletion by shifting back, so that
// churn leaves no tombstones behind. The array grows by half at 80 % load and shrinks below 20 %.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>

namespace {

struct Key {
    uint64_t a, b;
    bool operator==(const Key &other) const { return a == other.a && b == other.b; }
};

uint64_t mix(uint64_t x) {
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ULL;
    x ^= x >> 32;
    return x * 0xd6e8feb86659fd93ULL;
}

// Block keys are a digest already, but nothing here depends on that.
uint64_t hash_of(const Key &key) { return mix(key.a ^ mix(key.b)); }
uint64_t hash_of(uint64_t name) { return mix(name); }

bool is_empty(PyObject *value) { return value == nullptr; }
bool is_empty(const Key &value) { return value.a == 0 && value.b == 0; }

template <class K, class V> class Table {
  public:
    ~Table() { std::free(slots_); }

    size_t size() const { return size_; }
    size_t slots() const { return capacity_; }
    size_t bytes() const { return capacity_ * sizeof(Slot); }
    void prefetch(const K &key) const {
        if (capacity_) __builtin_prefetch(slots_ + home(key));
    }

    V *find(const K &key) const {
        if (!size_) return nullptr;
        for (size_t i = home(key);; i = next(i)) {
            if (is_empty(slots_[i].value)) return nullptr;
            if (slots_[i].key == key) return &slots_[i].value;
        }
    }

    // A place for a key that is not there yet; false when memory is out.
    bool insert(const K &key, const V &value) {
        if (size_ + 1 > capacity_ - capacity_ / 5 && !resize(capacity_ + capacity_ / 2 + 8))
            return false;
        place(key, value);
        size_++;
        return true;
    }

    void erase(const K &key) {
        size_t hole = home(key);
        while (!(slots_[hole].key == key)) hole = next(hole);
        for (size_t i = next(hole); !is_empty(slots_[i].value); i = next(i)) {
            // An entry may move into the hole unless its home lies after it.
            if (distance(home(slots_[i].key), i) >= distance(hole, i)) {
                slots_[hole] = slots_[i];
                hole = i;
            }
        }
        slots_[hole].value = V{};
        size_--;
        if (capacity_ > 64 && size_ < capacity_ / 5) resize(capacity_ / 2);  // may fail: no harm
    }

    template <class Visit> void each(size_t from, size_t to, Visit visit) const {
        for (size_t i = from; i < to && i < capacity_; i++)
            if (!is_empty(slots_[i].value)) visit(slots_[i].value);
    }

  private:
    struct Slot {
        K key;
        V value;
    };

    size_t home(const K &key) const {
        return (size_t)(((unsigned __int128)hash_of(key) * capacity_) >> 64);
    }
    size_t next(size_t i) const { return i + 1 == capacity_ ? 0 : i + 1; }
    size_t distance(size_t from, size_t to) const {
        return to >= from ? to - from : to + capacity_ - from;
    }

    void place(const K &key, const V &value) {
        size_t i = home(key);
        while (!is_empty(slots_[i].value)) i = next(i);
        slots_[i] = Slot{key, value};
    }

    bool resize(size_t capacity) {
        Slot *slots = static_cast<Slot *>(std::calloc(capacity, sizeof(Slot)));
        if (!slots) return false;
        Slot *old = slots_;
        size_t count = capacity_;
        slots_ = slots;
        capacity_ = capacity;
        for (size_t i = 0; i < count; i++)
            if (!is_empty(old[i].value)) place(old[i].key, old[i].value);
        std::free(old);
        return true;
    }

    Slot *slots_ = nullptr;
    size_t capacity_ = 0, size_ = 0;
};

bool read_key(PyObject *object, Key *key) {
    if (!PyBytes_Check(object) || PyBytes_GET_SIZE(object) != sizeof(Key)) {
        PyErr_Format(PyExc_TypeError, "a block key is 16 bytes, not %R", object);
        return false;
    }
    std::memcpy(key, PyBytes_AS_STRING(object), sizeof(Key));
    return true;
}

bool read_name(PyObject *object, uint64_t *name) {
    *name = PyLong_AsUnsignedLongLongMask(object);
    return *name != (uint64_t)-1 || !PyErr_Occurred();
}

template <class T> struct Object {
    PyObject_HEAD
    T table;
};
using Keys = Object<Table<Key, PyObject *>>;
using Names = Object<Table<uint64_t, Key>>;

template <class T> PyObject *make(PyTypeObject *type, PyObject *, PyObject *) {
    PyObject *self = type->tp_alloc(type, 0);
    if (self) new (&reinterpret_cast<T *>(self)->table) decltype(T::table)();
    return self;
}

template <class T> void destroy(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    using Held = decltype(T::table);
    reinterpret_cast<T *>(self)->table.~Held();
    type->tp_free(self);
    Py_DECREF(type);
}

template <class T> Py_ssize_t length(PyObject *self) {
    return (Py_ssize_t) reinterpret_cast<T *>(self)->table.size();
}

template <class T> PyObject *size_of(PyObject *self, PyObject *) {
    return PyLong_FromSize_t(sizeof(T) + reinterpret_cast<T *>(self)->table.bytes());
}

// -- KeyTable --------------------------------------------------------------------------------

Table<Key, PyObject *> &keys(PyObject *self) { return reinterpret_cast<Keys *>(self)->table; }

void keys_destroy(PyObject *self) {
    keys(self).each(0, SIZE_MAX, [](PyObject *value) { Py_DECREF(value); });
    destroy<Keys>(self);
}

PyObject *keys_get(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Key key;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "get(key, default)");
        return nullptr;
    }
    if (!read_key(args[0], &key)) return nullptr;
    PyObject **value = keys(self).find(key);
    return Py_NewRef(value ? *value : args[1]);
}

int keys_assign(PyObject *self, PyObject *object, PyObject *value) {
    Key key;
    if (!read_key(object, &key)) return -1;
    if (value && !PyLong_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "a KeyTable holds integers");
        return -1;
    }
    PyObject **held = keys(self).find(key);
    if (held) {
        PyObject *old = *held;
        if (value)
            *held = Py_NewRef(value);
        else
            keys(self).erase(key);
        Py_DECREF(old);
    } else if (!value) {
        PyErr_SetObject(PyExc_KeyError, object);
        return -1;
    } else if (keys(self).insert(key, value)) {
        Py_INCREF(value);
    } else {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

PyObject *keys_runs(PyObject *self, PyObject *sequence) {
    PyObject *fast = PySequence_Fast(sequence, "runs() takes a sequence of block keys");
    if (!fast) return nullptr;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
    PyObject **items = PySequence_Fast_ITEMS(fast);
    PyObject *runs = PyList_New(0), *zero = PyLong_FromLong(0), *last = nullptr;
    bool ok = runs && zero;
    constexpr Py_ssize_t ahead = 16;  // their cache misses overlap
    Key key;
    for (Py_ssize_t i = 0; ok && i < count && i < ahead; i++)
        if ((ok = read_key(items[i], &key))) keys(self).prefetch(key);
    for (Py_ssize_t i = 0; ok && i < count; i++) {
        if (i + ahead < count) {
            if (!(ok = read_key(items[i + ahead], &key))) break;
            keys(self).prefetch(key);
        }
        read_key(items[i], &key);
        PyObject **held = keys(self).find(key), *value = held ? *held : zero;
        if (value == last) continue;
        last = value;
        PyObject *run = Py_BuildValue("(nO)", i, value);
        ok = run && PyList_Append(runs, run) == 0;
        Py_XDECREF(run);
        if (!held) break;
    }
    Py_XDECREF(zero);
    Py_DECREF(fast);
    if (!ok) Py_CLEAR(runs);
    return runs;
}

// -- NameTable -------------------------------------------------------------------------------

Table<uint64_t, Key> &names(PyObject *self) { return reinterpret_cast<Names *>(self)->table; }

PyObject *key_object(const Key &key) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(&key), sizeof key);
}

PyObject *names_get(PyObject *self, PyObject *object) {
    uint64_t name;
    if (!read_name(object, &name)) return nullptr;
    Key *key = names(self).find(name);
    if (!key) Py_RETURN_NONE;
    return key_object(*key);
}

int names_contains(PyObject *self, PyObject *object) {
    uint64_t name;
    if (!read_name(object, &name)) return -1;
    return names(self).find(name) != nullptr;
}

int names_assign(PyObject *self, PyObject *object, PyObject *value) {
    uint64_t name;
    Key key;
    if (!read_name(object, &name)) return -1;
    Key *held = names(self).find(name);
    if (!value) {
        if (held) {
            names(self).erase(name);
            return 0;
        }
        PyErr_SetObject(PyExc_KeyError, object);
        return -1;
    }
    if (!read_key(value, &key)) return -1;
    if (is_empty(key)) {
        PyErr_SetString(PyExc_ValueError, "a block key of zeros means none");
        return -1;
    }
    if (held)
        *held = key;
    else if (!names(self).insert(name, key)) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

PyObject *names_slots_count(PyObject *self, PyObject *) {
    return PyLong_FromSize_t(names(self).slots());
}

PyObject *names_values(PyObject *self, PyObject *args) {
    Py_ssize_t from, to;
    if (!PyArg_ParseTuple(args, "nn", &from, &to)) return nullptr;
    if (from < 0 || to < from) {
        PyErr_SetString(PyExc_ValueError, "values(start, end) takes 0 <= start <= end");
        return nullptr;
    }
    PyObject *list = PyList_New(0);
    bool ok = list != nullptr;
    names(self).each((size_t)from, (size_t)to, [&](const Key &key) {
        PyObject *object = ok ? key_object(key) : nullptr;
        ok = object && PyList_Append(list, object) == 0;
        Py_XDECREF(object);
    });
    if (!ok) Py_CLEAR(list);
    return list;
}

// -- the module ------------------------------------------------------------------------------

PyMethodDef keys_methods[] = {
    {"get", (PyCFunction)(void (*)(void))keys_get, METH_FASTCALL, nullptr},
    {"runs", keys_runs, METH_O, nullptr},
    {"__sizeof__", size_of<Keys>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot keys_slots[] = {
    {Py_tp_new, (void *)make<Keys>},
    {Py_tp_dealloc, (void *)keys_destroy},
    {Py_tp_methods, keys_methods},
    {Py_mp_length, (void *)length<Keys>},
    {Py_mp_ass_subscript, (void *)keys_assign},
    {0, nullptr},
};
PyType_Spec keys_spec = {"kvatlas.core.tables.KeyTable", sizeof(Keys), 0, Py_TPFLAGS_DEFAULT,
                         keys_slots};

PyMethodDef names_methods[] = {
    {"get", names_get, METH_O, nullptr},
    {"slots", names_slots_count, METH_NOARGS, nullptr},
    {"values", names_values, METH_VARARGS, nullptr},
    {"__sizeof__", size_of<Names>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot names_slots[] = {
    {Py_tp_new, (void *)make<Names>},
    {Py_tp_dealloc, (void *)destroy<Names>},
    {Py_tp_methods, names_methods},
    {Py_mp_length, (void *)length<Names>},
    {Py_mp_ass_subscript, (void *)names_assign},
    {Py_sq_contains, (void *)names_contains},
    {0, nullptr},
};
PyType_Spec names_spec = {"kvatlas.core.tables.NameTable", sizeof(Names), 0, Py_TPFLAGS_DEFAULT,
                          names_slots};

int add_types(PyObject *module) {
    for (PyType_Spec *spec : {&keys_spec, &names_spec}) {
        PyObject *type = PyType_FromModuleAndSpec(module, spec, nullptr);
        int status = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
        Py_XDECREF(type);
        if (status) return -1;
    }
    return 0;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)add_types}, {0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "tables", nullptr, 0, nullptr,
                      module_slots,          nullptr,  nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_tables() { return PyModuleDef_Init(&module); }
