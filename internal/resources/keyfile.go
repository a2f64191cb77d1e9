package resources

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/kinference/kinference/internal/apikey"
)

// KeyFolder writes records of API keys beside the resources of a folder, each
// Secret to a file of its own. The zero value of the lock is ready; several
// processes may write at once.
type KeyFolder struct {
	Dir string
	mu  sync.Mutex
}

// ErrNotOurs is of a Secret that only people may write.
var ErrNotOurs = errors.New("is not written by kinfctl keys")

// Put changes or adds one record of a Secret: change gets those that there are,
// and returns the one to write. The file is replaced at once, so that a reader sees
// all of it or the one before.
func (k *KeyFolder) Put(ctx context.Context, namespace, name string, change func([]apikey.Record) (apikey.Record, error)) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	unlock, err := lockFile(ctx, filepath.Join(k.Dir, ".keys.lock"))
	if err != nil {
		return fmt.Errorf("lock the folder of resources: %w", err)
	}
	defer unlock()
	file := namespace + "." + name + ".keys.yaml"
	path := filepath.Join(k.Dir, file)
	records, err := k.read(namespace, name, file)
	if err != nil {
		return err
	}
	r, err := change(records)
	if err != nil {
		return err
	}
	records = append(slices.DeleteFunc(records, func(o apikey.Record) bool { return o.ID == r.ID }), r)
	if len(records) > apikey.MaxRecords {
		return fmt.Errorf("the Secret holds %d keys already: give the tenant another one", apikey.MaxRecords)
	}
	slices.SortFunc(records, func(a, b apikey.Record) int { return strings.Compare(a.ID, b.ID) })
	return replace(path, keyFile(namespace, name, records))
}

// read finds the records of a Secret in its file. That another file has the Secret
// is an error: nobody but its author changes that one.
func (k *KeyFolder) read(namespace, name, own string) ([]apikey.Record, error) {
	files, ps := read(k.Dir)
	if err := ps.Err(); err != nil {
		return nil, err
	}
	for _, f := range files {
		p := &parser{}
		if f.name == own || strings.Contains(string(f.data), kindSecret) {
			p.file(f)
		}
		if f.name == own && (p.problems.Err() != nil || len(p.objects) > 0 || len(p.secrets) > 1) {
			return nil, fmt.Errorf("the file %s %w, or is broken: mend it first", own, ErrNotOurs)
		}
		for _, s := range p.secrets {
			switch here := s.Namespace == namespace && s.Name == name; {
			case here && f.name == own:
				return s.Keys, nil
			case here:
				return nil, fmt.Errorf("the Secret %s/%s in %s %w: move its entries to %s", namespace, name, f.name, ErrNotOurs, own)
			case f.name == own:
				return nil, fmt.Errorf("the file %s holds another Secret: it %w", own, ErrNotOurs)
			}
		}
	}
	return nil, nil
}

func keyFile(namespace, name string, records []apikey.Record) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "# Records of API keys, written by kinfctl keys. The keys themselves are nowhere.\napiVersion: v1\nkind: Secret\nmetadata:\n  name: %s\n  namespace: %s\n"+
		"  labels: { %s: \"true\" }\ntype: Opaque\nstringData:\n", name, namespace, apikey.Label)
	for i := range records {
		fmt.Fprintf(&b, "  %q: '%s'\n", records[i].ID, strings.ReplaceAll(string(records[i].Encode()), "'", "''"))
	}
	return []byte(b.String())
}

// replace writes a file in one step. Its name before begins with a dot, by which it
// is no resource.
func replace(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".keys-*")
	if err != nil {
		return fmt.Errorf("write records of API keys: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }() // gone, once it is renamed
	mode := os.FileMode(0o600)
	if info, serr := os.Stat(path); serr == nil {
		mode = info.Mode().Perm()
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write records of API keys: %w", err)
	}
	return nil
}
