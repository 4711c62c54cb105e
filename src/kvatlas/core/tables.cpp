// Two compact hash tables for the directory, see _native.pyi.
//
// A dict spends about 150 bytes on one 16-byte key and three cache misses on one lookup; the
// directory holds millions and looks up a hundred at a time. Here an entry is 24 bytes in one
// flat array: open addressing with linear probing, and deletion by shifting back, so that
// churn leaves no tombstones behind. The array grows by half at 80 % load and shrinks below 20 %.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace nb = nanobind;

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

bool is_empty(const nb::object &value) { return !value.is_valid(); }
bool is_empty(const Key &value) { return value.a == 0 && value.b == 0; }

template <class K, class V> class Table {
  public:
    size_t size() const { return size_; }
    size_t slots() const { return capacity_; }
    size_t bytes() const { return sizeof *this + capacity_ * sizeof(Slot); }
    void prefetch(const K &key) const {
        if (size_) __builtin_prefetch(&slots_[home(key)]);
    }

    // The value of a key, until the table changes; nullptr when the key is not there.
    V *find(const K &key) {
        if (!size_) return nullptr;
        for (size_t i = home(key);; i = next(i)) {
            if (is_empty(slots_[i].value)) return nullptr;
            if (slots_[i].key == key) return &slots_[i].value;
        }
    }

    // For a key that is not there yet; std::bad_alloc leaves the table as it was.
    void insert(const K &key, V &&value) {
        if (size_ + 1 > capacity_ - capacity_ / 5) resize(capacity_ + capacity_ / 2 + 8);
        place(key, std::move(value));
        size_++;
    }

    // Takes out what `find` has found.
    V take(V *found) {
        V value = std::exchange(*found, V{});
        size_t hole = slot_of(found);
        for (size_t i = next(hole); !is_empty(slots_[i].value); i = next(i)) {
            // An entry may move into the hole unless its home lies after it.
            if (distance(home(slots_[i].key), i) >= distance(hole, i)) {
                slots_[hole].key = slots_[i].key;
                slots_[hole].value = std::exchange(slots_[i].value, V{});
                hole = i;
            }
        }
        size_--;
        if (capacity_ > 64 && size_ < capacity_ / 5) try_to_shrink();
        return value;
    }

    template <class Visit> void each(size_t from, size_t to, Visit visit) const {
        for (size_t i = from; i < to && i < capacity_; i++)
            if (!is_empty(slots_[i].value)) visit(slots_[i].key, slots_[i].value);
    }

  private:
    struct Slot {
        K key;
        V value;
    };

    size_t home(const K &key) const {
        return static_cast<size_t>((static_cast<unsigned __int128>(hash_of(key)) * capacity_) >> 64);
    }
    size_t next(size_t i) const { return i + 1 == capacity_ ? 0 : i + 1; }
    size_t distance(size_t from, size_t to) const {
        return to >= from ? to - from : to + capacity_ - from;
    }
    size_t slot_of(const V *value) const {
        const auto offset = reinterpret_cast<const char *>(value) -
                            reinterpret_cast<const char *>(slots_.get());
        return static_cast<size_t>(offset) / sizeof(Slot);
    }

    void place(const K &key, V &&value) {
        size_t i = home(key);
        while (!is_empty(slots_[i].value)) i = next(i);
        slots_[i].key = key;
        slots_[i].value = std::move(value);
    }

    void try_to_shrink() noexcept {
        try {
            resize(capacity_ / 2);
        } catch (const std::bad_alloc &) {  // it stays large until the next time
        }
    }

    void resize(size_t capacity) {
        auto old = std::make_unique<Slot[]>(capacity);
        slots_.swap(old);
        std::swap(capacity_, capacity);
        for (Slot *slot = old.get(); slot < old.get() + capacity; slot++)
            if (!is_empty(slot->value)) place(slot->key, std::move(slot->value));
    }

    std::unique_ptr<Slot[]> slots_;
    size_t capacity_ = 0, size_ = 0;
};

[[noreturn]] void raise(PyObject *type, const char *message) {
    PyErr_SetString(type, message);
    throw nb::python_error();
}

[[noreturn]] void raise_key_error(nb::handle key) {
    PyErr_SetObject(PyExc_KeyError, key.ptr());
    throw nb::python_error();
}

Key key_of(nb::handle object) {
    if (!PyBytes_Check(object.ptr()) || PyBytes_GET_SIZE(object.ptr()) != sizeof(Key)) {
        PyErr_Format(PyExc_TypeError, "a block key is 16 bytes, not %R", object.ptr());
        throw nb::python_error();
    }
    Key key;
    std::memcpy(&key, PyBytes_AS_STRING(object.ptr()), sizeof key);
    return key;
}

uint64_t name_of(nb::handle object) {
    const uint64_t name = PyLong_AsUnsignedLongLongMask(object.ptr());
    if (name == static_cast<uint64_t>(-1) && PyErr_Occurred()) throw nb::python_error();
    return name;
}

constexpr Py_ssize_t AHEAD = 16;  // so many look-ups at a time wait for memory

std::vector<Key> keys_of(nb::handle sequence) {
    const nb::object items =
        nb::steal(PySequence_Fast(sequence.ptr(), "add() takes a sequence of block keys"));
    if (!items) throw nb::python_error();
    std::vector<Key> keys(static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())));
    for (size_t i = 0; i < keys.size(); i++)
        keys[i] = key_of(PySequence_Fast_ITEMS(items.ptr())[i]);
    return keys;
}

struct KeyTable : Table<Key, nb::object> {
    nb::handle get(nb::handle key, nb::handle otherwise) {
        const nb::object *held = find(key_of(key));
        return held ? nb::handle(*held) : otherwise;
    }

    void set(nb::handle object, nb::handle value) {
        const Key key = key_of(object);
        if (!PyLong_Check(value.ptr())) raise(PyExc_TypeError, "a KeyTable holds integers");
        nb::object taken = nb::borrow(value);
        if (nb::object *held = find(key))
            std::swap(*held, taken);  // the old value goes last: that may run anybody's code
        else
            insert(key, std::move(taken));
    }

    void remove(nb::handle key) {
        nb::object *held = find(key_of(key));
        if (!held) raise_key_error(key);
        take(held);
    }

    nb::list add(nb::handle sequence, const nb::int_ &bit, nb::dict shared) {
        const std::vector<Key> keys = keys_of(sequence);
        const auto one_of = [&](const nb::object &value) {
            PyObject *known = PyDict_SetDefault(shared.ptr(), value.ptr(), value.ptr());
            if (!known) throw nb::python_error();
            return nb::borrow(known);
        };
        const nb::object alone = one_of(bit);
        nb::object before = nb::none(), after;  // of the key before: neighbours are held alike
        nb::list places;
        for (size_t i = 0; i < keys.size(); i++) {
            if (i + AHEAD < keys.size()) prefetch(keys[i + AHEAD]);
            nb::object *held = find(keys[i]);
            if (!held) {
                insert(keys[i], nb::object(alone));
                continue;
            }
            if (!held->is(before)) {
                before = *held;
                after = nb::object(before | bit).equal(before) ? before : one_of(before | bit);
            }
            if (after.is(before))
                places.append(i);
            else
                *held = after;  // `before` is held here: nothing is freed, nobody's code runs
        }
        return places;
    }

    nb::list runs(nb::handle sequence) {
        const nb::object keys =
            nb::steal(PySequence_Fast(sequence.ptr(), "runs() takes a sequence of block keys"));
        if (!keys) throw nb::python_error();
        PyObject **items = PySequence_Fast_ITEMS(keys.ptr());
        Py_ssize_t count = PySequence_Fast_GET_SIZE(keys.ptr());
        for (Py_ssize_t i = 0; i < count && i < AHEAD; i++) prefetch(key_of(items[i]));
        const nb::object zero = nb::int_(0);
        nb::handle last;
        nb::list runs;
        for (Py_ssize_t i = 0; i < count; i++) {
            if (i + AHEAD < count) prefetch(key_of(items[i + AHEAD]));
            const nb::object *held = find(key_of(items[i]));
            const nb::handle value = held ? *held : zero;
            if (!value.is(last)) {
                runs.append(nb::make_tuple(i, value));
                // That may collect garbage, and so run code that changes the caller's list.
                items = PySequence_Fast_ITEMS(keys.ptr());
                count = PySequence_Fast_GET_SIZE(keys.ptr());
            }
            if (!held) break;
            last = value;
        }
        return runs;
    }
};

struct NameTable : Table<uint64_t, Key> {
    static nb::bytes object_of(const Key &key) { return nb::bytes(&key, sizeof key); }

    nb::object get(nb::handle name) {
        const Key *key = find(name_of(name));
        return key ? nb::object(object_of(*key)) : nb::none();
    }

    bool contains(nb::handle name) { return find(name_of(name)); }

    void set(nb::handle object, nb::handle value) {
        const uint64_t name = name_of(object);
        Key key = key_of(value);
        if (is_empty(key)) raise(PyExc_ValueError, "a block key of zeros means none");
        if (Key *held = find(name))
            *held = key;
        else
            insert(name, std::move(key));
    }

    void remove(nb::handle name) {
        Key *held = find(name_of(name));
        if (!held) raise_key_error(name);
        take(held);
    }

    void add(nb::handle objects, nb::handle values) {
        const std::vector<Key> keys = keys_of(values);
        const nb::object items =
            nb::steal(PySequence_Fast(objects.ptr(), "add() takes a sequence of names"));
        if (!items) throw nb::python_error();
        std::vector<uint64_t> names(static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())));
        if (names.size() != keys.size()) raise(PyExc_ValueError, "as many names as keys");
        for (size_t i = 0; i < names.size(); i++) {
            names[i] = name_of(PySequence_Fast_ITEMS(items.ptr())[i]);
            if (is_empty(keys[i])) raise(PyExc_ValueError, "a block key of zeros means none");
        }
        for (size_t i = 0; i < names.size(); i++) {
            if (i + AHEAD < names.size()) prefetch(names[i + AHEAD]);
            if (Key *held = find(names[i]))
                *held = keys[i];
            else
                insert(names[i], Key(keys[i]));
        }
    }

    nb::list values(Py_ssize_t start, Py_ssize_t end) const {
        if (start < 0 || end < start)
            raise(PyExc_ValueError, "values(start, end) takes 0 <= start <= end");
        nb::list keys;
        each(static_cast<size_t>(start), static_cast<size_t>(end),
             [&](uint64_t, const Key &key) { keys.append(object_of(key)); });
        return keys;
    }

    nb::list entries(Py_ssize_t start, Py_ssize_t end) const {
        if (start < 0 || end < start)
            raise(PyExc_ValueError, "entries(start, end) takes 0 <= start <= end");
        nb::list found;
        each(static_cast<size_t>(start), static_cast<size_t>(end),
             [&](uint64_t name, const Key &key) {
                 found.append(nb::make_tuple(name, object_of(key)));
             });
        return found;
    }
};

// -- the hot part of the binding -------------------------------------------------------------

// Entries are read and written one by one, millions of times, and nanobind's choice among
// overloads would double the time of each. So these few go from the type's own slots to the table.

template <class T> T &table_of(PyObject *self) {
    if (!nb::inst_ready(self)) raise(PyExc_TypeError, "this table was never initialised");
    return *nb::inst_ptr<T>(self);
}

// What `call` answers; where it throws, Python gets the exception and the slot says `failed`.
template <class Answer, class Call> Answer answer(Answer failed, Call call) noexcept {
    try {
        return call();
    } catch (nb::python_error &error) {
        error.restore();
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    }
    return failed;
}

template <class T> int assign(PyObject *self, PyObject *key, PyObject *value) {
    return answer(-1, [&] {
        T &table = table_of<T>(self);
        value ? table.set(key, value) : table.remove(key);
        return 0;
    });
}

template <class T> Py_ssize_t length(PyObject *self) {
    return answer<Py_ssize_t>(-1, [&] { return table_of<T>(self).size(); });
}

int contains_name(PyObject *self, PyObject *name) {
    return answer(-1, [&] { return int{table_of<NameTable>(self).contains(name)}; });
}

PyObject *get_key(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return answer<PyObject *>(nullptr, [&] {
        if (count != 2) raise(PyExc_TypeError, "get(key, default)");
        return table_of<KeyTable>(self).get(args[0], args[1]).inc_ref().ptr();
    });
}

PyObject *get_name(PyObject *self, PyObject *name) {
    return answer<PyObject *>(
        nullptr, [&] { return table_of<NameTable>(self).get(name).release().ptr(); });
}

template <class Function> void *slot(Function *function) {
    return reinterpret_cast<void *>(function);
}

PyMethodDef key_methods[] = {{"get", reinterpret_cast<PyCFunction>(slot(get_key)), METH_FASTCALL},
                             {}};
PyType_Slot key_slots[] = {
    {Py_tp_methods, key_methods},
    {Py_mp_ass_subscript, slot(assign<KeyTable>)},
    {Py_mp_length, slot(length<KeyTable>)},
    {},
};

PyMethodDef name_methods[] = {{"get", get_name, METH_O}, {}};
PyType_Slot name_slots[] = {
    {Py_tp_methods, name_methods},
    {Py_mp_ass_subscript, slot(assign<NameTable>)},
    {Py_mp_length, slot(length<NameTable>)},
    {Py_sq_contains, slot(contains_name)},
    {},
};

}  // namespace

void bind_tables(nb::module_ &module) {
    nb::class_<KeyTable>(module, "KeyTable", nb::is_final(), nb::type_slots(key_slots))
        .def(nb::init<>())
        .def("add", &KeyTable::add)
        .def("runs", &KeyTable::runs)
        .def("__sizeof__", &KeyTable::bytes);
    nb::class_<NameTable>(module, "NameTable", nb::is_final(), nb::type_slots(name_slots))
        .def(nb::init<>())
        .def("add", &NameTable::add)
        .def("slots", &NameTable::slots)
        .def("values", &NameTable::values)
        .def("entries", &NameTable::entries)
        .def("__sizeof__", &NameTable::bytes);
}
