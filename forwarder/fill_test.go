package forwarder_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kmirror/forwarder"
	"kmirror/internal/scripted"
	"kmirror/protocol"
)

// A filler whose answer is lost is counted by the mirror's log end, not by memory (fill.go: runFiller, which begins anew): whether it was applied or not, offsets stay equal.
func TestFillersAreCountedByTheLog(t *testing.T) {
	for name, fault := range map[string]scripted.Action{"applied": scripted.ApplyThenDrop(), "not applied": scripted.DropBefore()} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, scripted.Options{})
			for i := range 4 {
				r.source.Append("orders", 0, scripted.Batch{
					ProducerID: 5, BaseSequence: int32(2 * i), Attributes: protocol.AttrTransactional, Values: []string{fmt.Sprint("a", i), fmt.Sprint("b", i)},
				})
				r.source.AppendMarker("orders", 0, 5, 0, true)
				if i == 2 { // an empty transaction more: two markers in a row
					r.source.AppendMarker("orders", 0, 5, 0, true)
				}
			}
			lost := r.mirror.InterceptNext(3, endTxnKey, nil, func(*scripted.Request) scripted.Action { return fault })
			f, stop := r.start(func(o *forwarder.Options) { o.FillTime = time.Minute })
			waitCaughtUp(t, f)
			r.mirror.Await(t, "the mirror's log end", func() bool { return r.mirror.Offsets("orders", 0).LogEnd >= r.source.Offsets("orders", 0).LogEnd })
			stop()
			f, _ = r.start(func(o *forwarder.Options) { o.FillTime = time.Minute })
			r.write(0, "c", "d")
			waitCaughtUp(t, f)
			if len(lost) != 3 {
				t.Errorf("%d fillers met the fault, want 3", len(lost))
			}
			r.sameOffsets()
		})
	}
}

// sameOffsets compares the offsets of all records on both sides, and the logs' ends.
func (r *rig) sameOffsets() {
	r.t.Helper()
	list := func(c *scripted.Cluster) (text string) {
		for _, rec := range c.Records("orders", 0) {
			if !rec.Control && !rec.Aborted {
				text += fmt.Sprintf("%d=%s ", rec.Offset, rec.Value)
			}
		}
		return text + fmt.Sprint("end ", c.Offsets("orders", 0).LogEnd)
	}
	if source, mirror := list(r.source), list(r.mirror); source != mirror {
		r.t.Errorf("the source has %s, the mirror %s", source, mirror)
	}
}

// Holes with aborted records are filled only where the settings want it; the stream then goes on with offsets of its own, and nothing else is filled.
func TestWhatIsFilled(t *testing.T) {
	for name, c := range map[string]struct {
		policy  forwarder.OffsetPolicy
		fillers int
	}{"auto": {forwarder.OffsetsAuto, 1}, "identical": {forwarder.OffsetsIdentical, 6}, "mapped": {forwarder.OffsetsMapped, 0}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, scripted.Options{})
			for i, commit := range []bool{true, false, true} {
				r.source.Append("orders", 0, scripted.Batch{
					ProducerID: 5, BaseSequence: int32(3 * i), Attributes: protocol.AttrTransactional, Values: []string{fmt.Sprint("a", i), fmt.Sprint("b", i), fmt.Sprint("c", i)},
				})
				r.source.AppendMarker("orders", 0, 5, 0, commit)
				if i == 0 {
					r.write(0, "p")
				}
			}
			f, _ := r.start(func(o *forwarder.Options) { o.FillTime, o.Offsets = time.Minute, c.policy })
			waitCaughtUp(t, f)
			if c.policy == forwarder.OffsetsIdentical {
				r.mirror.Await(t, "the mirror's log end", func() bool { return r.mirror.Offsets("orders", 0).LogEnd >= r.source.Offsets("orders", 0).LogEnd })
				r.sameOffsets()
			}
			fillers := 0
			for _, b := range r.mirror.Log("orders", 0) {
				if b.Control() {
					fillers++
				}
			}
			if fillers != c.fillers {
				t.Errorf("%d fillers on the mirror, want %d", fillers, c.fillers)
			}
		})
	}
}

// A coordinator that is busy with an ID for ever, or says nothing, ends filling when the patience is over, long before timing.fill is, and the log says why
// (fill.go: fillStep's deadline).
func TestALastinglyBusyCoordinatorEndsFilling(t *testing.T) {
	for name, c := range map[string]struct {
		key    int16
		action func() scripted.Action
		want   error
	}{
		"busy":      {addPartitionsToTxnKey, func() scripted.Action { return scripted.Fail(kerr.ConcurrentTransactions) }, kerr.ConcurrentTransactions},
		"no answer": {initProducerIDKey, scripted.HoldForever, context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, scripted.Options{})
			r.source.Append("orders", 0, scripted.Batch{ProducerID: 5, Attributes: protocol.AttrTransactional, Values: []string{"a"}})
			r.source.AppendMarker("orders", 0, 5, 0, true)
			r.write(0, "b")
			r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
				if req.Key == c.key {
					if init, ok := req.Body.(*kmsg.InitProducerIDRequest); !ok || init.TransactionalID != nil {
						return c.action()
					}
				}
				return scripted.Pass()
			})
			core, logs := observer.New(zap.InfoLevel)
			f, _ := r.start(func(o *forwarder.Options) {
				o.FillTime, o.FillPatience, o.Logger = time.Hour, 300*time.Millisecond, zap.New(core)
			})
			r.wantAll(f, "a b")
			said := logs.FilterMessage("offsets on the mirror are not the source's from here on").All()
			if len(said) != 1 {
				t.Fatalf("the log says %d times that offsets shift, want once", len(said))
			}
			var err error
			for _, field := range said[0].Context {
				if field.Key == "error" {
					err, _ = field.Interface.(error)
				}
			}
			if !errors.Is(err, c.want) || !strings.Contains(fmt.Sprint(err), "nothing was filled for 300ms") {
				t.Errorf("the log gives %v as the reason, want %v and how long", err, c.want)
			}
		})
	}
}
