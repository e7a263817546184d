import java.lang.reflect.*;
import java.util.*;
import org.apache.kafka.clients.admin.Admin;

/** An Admin that notes which of its methods were called, so that none of a newer Kafka's is forgotten. */
final class Asked implements AutoCloseable {
    /** Methods of Admin that no broker answers. */
    private static final Set<String> LOCAL = Set.of(
        "metrics", "registerMetricForSubscription", "unregisterMetricFromSubscription", // the client's own counters
        "close"); // called after the check

    final Admin admin;
    private final Admin real;
    private final Set<String> called = new TreeSet<>();

    Asked(Admin real) {
        this.real = real;
        admin = (Admin) Proxy.newProxyInstance(Admin.class.getClassLoader(), new Class<?>[] {Admin.class}, this::call);
    }

    /** Overloads are followed down to the method that does the work, which alone counts. */
    private Object call(Object proxy, Method method, Object[] args) throws Throwable {
        if (method.isDefault()) return InvocationHandler.invokeDefault(proxy, method, args);
        called.add(signature(method));
        try {
            return method.invoke(real, args);
        } catch (InvocationTargetException e) {
            throw e.getCause();
        }
    }

    private static String signature(Method method) {
        StringJoiner types = new StringJoiner(", ", method.getName() + "(", ")");
        for (Class<?> type : method.getParameterTypes()) types.add(type.getSimpleName());
        return types.toString();
    }

    /** Fails if Admin has a method that was neither called nor is local. */
    void check() {
        Set<String> missing = new TreeSet<>();
        for (Method method : Admin.class.getMethods()) {
            boolean ours = Modifier.isAbstract(method.getModifiers()) && !LOCAL.contains(method.getName());
            if (ours && !called.contains(signature(method))) missing.add(signature(method));
        }
        if (!missing.isEmpty()) throw new IllegalStateException("methods of Admin that nobody called: " + missing);
        Transcript.section("all " + called.size() + " methods of Admin were called");
    }

    @Override
    public void close() {
        real.close();
    }
}
